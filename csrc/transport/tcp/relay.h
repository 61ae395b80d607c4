#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/tcp/socket.h"
#include "transport/tcp/wire.h"

namespace lowcomm::tcp {

// Joins the connections of two ranks that both dial, because neither can be reached: each asks for the other by a Hello
// (Hello::relays), is answered by one when the other is there, and from then on each receives what the other sends.
// With a secret that is TLS between the two, which the relay cannot read. If one ends its connection, the other
// receives everything that was sent before, and then the end.
//
// The endpoint admits only members: ranks whose request has the secret's code, or, without a secret, ranks of a group
// that it belongs to. A relay process without a secret admits every rank that asks.
//
// Bounded in what it holds: kMostJoined pairs with two buffers of kBufferBytes, and kMostWaiting ranks that wait for
// kWithin; kOfAHost connections, waiting or joined, of an address that has not proved that it has the secret; a pair of
// which one has ended stays for kWithin at most. Used by the endpoint's thread.
class Relay {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr size_t kMostJoined = 256, kMostWaiting = 256, kOfAHost = 128, kBufferBytes = 64 * 1024;
  static constexpr std::chrono::seconds kWithin{10};

  // One that asks, from the network `host`; empty: it has the secret. Where it has asked before the older connection
  // goes; where there is no room, this one, and false is returned.
  bool admit(Fd fd, const Hello& request, const std::string& host);

  void clear() {
    waiting_.clear();
    pairs_.clear();
  }

  // Appends what to wait for, of each connection; ready() gets the same, after poll().
  void waitFor(std::vector<pollfd>& waits) const;
  void ready(std::span<const pollfd> waits);

  // Lets go of who has waited too long for another, or for the other's end.
  void tick();

  size_t joined() const { return pairs_.size(); }
  uint64_t bytes() const { return bytes_; }  // passed on

 private:
  struct Waiting {
    Fd fd;
    Hello request;
    std::string host;
    Clock::time_point deadline;
  };
  // One of two joined connections, and the data it has sent that the other has not received yet.
  struct Side {
    Fd fd;
    std::string host = {};
    std::vector<std::byte> buffer = std::vector<std::byte>(kBufferBytes);
    size_t begin = 0, end = 0;
    bool is_over = false;       // it sends no more
    bool write_closed = false;  // the peer reads no more; data from the other side is discarded
    bool is_told = false;       // that the other sends no more
  };
  struct Pair {
    Side a, b;
    std::optional<Clock::time_point> deadline = {};  // from the end of one
    bool isOver() const { return a.is_told && b.is_told; }
  };

  size_t countOf(const std::string& host) const;
  void join(Waiting first, Waiting second);
  void pass(Side& from, Side& to);

  std::list<Waiting> waiting_;
  std::list<Pair> pairs_;
  uint64_t bytes_ = 0;
};

}  // namespace lowcomm::tcp
