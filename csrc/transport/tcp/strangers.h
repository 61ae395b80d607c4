#pragma once

#include <poll.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/tcp/secure.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/wire.h"

namespace lowcomm::tcp {

// The connections from outside that have yet to say a Hello, inside TLS where there is a secret. Whoever reaches the
// port can make some, so all that they get is bounded: kHalfOpen connections at a time, kOfAHost to an address that has
// not shown that it has the secret, kWithin for a Hello, kHeardATurn of them a turn of the endpoint's loop, and the
// memory that is said in SecurePipe. Where there are too many the oldest gives way: a member says who it is at once.
// A Hello proves nothing by itself. The endpoint admits its sender as a member of a group whose id cannot be guessed,
// as one of a bounded number of clients (TunnelExit), or to a relay by its code (Relay).
//
// Used by the endpoint's thread.
class Strangers {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr size_t kHalfOpen = 64, kOfAHost = 8, kHeardATurn = 4;
  static constexpr std::chrono::seconds kWithin{3};

  // `port`: in the log. `tls`: null where there is no secret. `incarnation`: of this process.
  Strangers(std::string port, std::shared_ptr<Tls> tls, uint64_t incarnation,
            std::chrono::milliseconds log_every = std::chrono::minutes(1))
      : port_(std::move(port)), tls_(std::move(tls)), incarnation_(incarnation), log_every_(log_every) {}

  size_t size() const { return strangers_.size(); }

  void admit(Fd fd, const Address& from);

  // Appends what to wait for, of each of them.
  void waitFor(std::vector<pollfd>& waits) const;

  struct PendingHello {
    struct Introduction {
      std::unique_ptr<Pipe> pipe;
      Hello hello;
      RelayCode code;    // of a request to a relay
      std::string host;  // its network; empty: it has shown that it has the secret
    };
    std::vector<Introduction> introductions;  // those who have said a Hello are strangers no more
    std::vector<Identity> other_secrets;      // what those call themselves who have another secret
    bool all = true;                          // false: there are more to be heard next turn
  };

  void clear() { strangers_.clear(); }

  // Hears those of whom poll() says so, and lets go of those who take too long. `waits`: as waitFor() has made them.
  PendingHello hear(std::span<const pollfd> waits);

  enum class Kind { silent, other, other_secret, unknown, crowded };
  static constexpr size_t kKinds = 5;

  // Somebody turned out to be no member. A line of the log a minute says how many of each kind there were.
  void count(Kind kind) { ++counts_[static_cast<size_t>(kind)]; }
  void report();

 private:
  struct Stranger {
    std::unique_ptr<Pipe> pipe;
    SecurePipe* secure;  // the same, or null
    std::string host;
    Clock::time_point deadline;
    bool has_secret = false, has_spoken = false;
    std::array<std::byte, kHelloBytes + kRelayCodeBytes> said = {};
    size_t have = 0, expected = kHelloBytes;
  };
  using Place = std::list<Stranger>::iterator;

  bool hear(Stranger& stranger, PendingHello& heard);  // whether that is over
  void makeRoom(const std::string& host);

  const std::string port_;
  const std::shared_ptr<Tls> tls_;
  const uint64_t incarnation_;
  const std::chrono::milliseconds log_every_;
  std::list<Stranger> strangers_;
  std::array<uint64_t, kKinds> counts_{};
  std::string last_host_;
  std::optional<Clock::time_point> log_at_;
};

}  // namespace lowcomm::tcp
