#pragma once

#include <poll.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/tcp/connection.h"
#include "transport/tcp/message_stream.h"
#include "transport/tcp/secure.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/wire.h"

namespace lowcomm::tcp {

// Where a channel leads.
struct Route {
  GroupId group{};
  int rank = 0, peer = 0;
  uint32_t channel = 0;
  uint64_t incarnation = 0, peer_incarnation = 0;          // of the peer 0: that of the first process that answers
  std::vector<std::pair<std::string, Address>> addresses;  // of the peer's endpoint, as text too; tried in turn
  std::vector<std::pair<std::string, Address>> relays;     // of a relay, tried where these lead nowhere
  std::shared_ptr<Tls> tls;                                // null: bytes travel as they are

  uint64_t most_early = kUnaskedBytes;  // MessageStream
  std::chrono::seconds patience{0};     // without a connection for so long the channel fails; 0: never

  bool dials = false;              // at first: this rank does, the other waits to be dialled
  bool is_one_of_several = false;  // of the channels of a far peer, that is (connectionsOver in pace.h)
};

// The error for a peer whose secret differs from this process's.
inline constexpr const char* kOtherSecret =
    "expected the same LOWCOMM_SECRET or LOWCOMM_SECRET_FILE on all ranks, got another secret there";

// Whether a Hello went whole into a connection that was just made.
bool sendHello(Pipe& pipe, const Hello& hello);

// Makes the connections of one channel: decides which rank dials, dials the peer's addresses and relays in turn, and
// exchanges Hellos. It makes one connection at a time, and only while the channel has none (lost() until connected()).
//
// The dialling rank dials first at once, then twice a second. The other rank asks, by a Hello and at the same
// intervals, whether the peer's process and group still exist, because otherwise no rank would dial. They are gone when
// every address has refused kRounds times in a row; silence proves nothing, and is left to the op's deadline.
//
// A rank that cannot be reached is detected: after kReverseAfter without a connection, the one that the other rank
// dials is to carry the channel (Hello::carries), and if it gets through, that rank dials from then on. If neither gets
// through for kRelayAfter, both dial a relay (Relay), over whose connection the higher rank continues as the dialling
// side, and the lower one as the accepting side.
//
// Used by the endpoint's thread, or under its lock.
class Dialer {
 public:
  // Hellos say how much of `stream` has come; it outlives this.
  Dialer(Route route, MessageStream& stream) : route_(std::move(route)), stream_(stream), dials_(route_.dials) {}

  const Route& route() const { return route_; }

  // Before it is used: the way to the peer is that of another channel, which has found out who dials, and whom.
  void copyRoute(const Dialer& other);

  // A connection that carries the channel from now on, with the peer's Hello; or why the channel fails for good; or,
  // while a connection is being made, neither.
  struct Outcome {
    std::unique_ptr<Pipe> pipe = nullptr;
    Hello answer = {};
    std::optional<std::string> gone = {};
  };

  // For poll(): what to wait for, an fd below 0 if nothing; ready() when it has come.
  pollfd waitsFor() const;
  Outcome ready();

  // Dials when it is time, and moves on from an address that does not answer.
  Outcome tick();

  // Answers the Hello of a peer that has dialled. Returns whether its connection carries the channel from now on.
  // `connected`: the channel has another connection.
  bool answer(Pipe& pipe, const Hello& theirs, bool connected);

  // The channel has a connection, over this socket; it has lost it; it has ended, and nothing is dialled any more.
  void connected(int fd);
  void lost(const std::string& why);
  void stop() { dial_.reset(); }

  // Returns a relayed connection to the peer, which sends its Hello on it next; empty if no relay has joined one.
  Fd takeJoined() { return std::move(joined_); }

  // A process that calls itself the peer has another secret. Any process can, so that is only reported where no
  // connection was ever made.
  void noteOtherSecret() { other_secret_ = true; }
  bool hasOtherSecret() const { return other_secret_ && !was_connected_; }

  // Names the path of a connection by the address at its other end: "direct", or "relay " and the address.
  std::string pathOf(int fd) const;

 private:
  // A connection that is being made from here.
  struct Dial {
    std::string to;
    bool by_relay = false, joined = false;  // and that has joined it
    std::unique_ptr<Pipe> pipe;
    bool connected = false, said = false, carries = false;
    Clock::time_point deadline;
    std::array<std::byte, kHelloBytes> answer;
    size_t have = 0;
  };

  Hello hello(bool carries);
  bool wantsRelay() const;
  std::unique_ptr<Pipe> pipeOver(Fd fd) const;
  Outcome dial();
  Outcome relayReady();
  std::optional<std::string> readAnswer();
  bool refusalsCount() const;
  Outcome refused();  // the address has said that the peer is not there
  Outcome silent();
  Outcome tryNext();

  Route route_;
  MessageStream& stream_;
  std::optional<Dial> dial_;
  Clock::time_point dial_at_ = Clock::now();
  std::chrono::milliseconds pause_{0};  // before the next dial
  bool dials_;
  bool was_relayed_ = false, was_connected_ = false;  // the last connection; any
  Fd joined_;
  Clock::time_point down_since_ = Clock::now();
  size_t next_address_ = 0;
  bool all_refused_ = true;  // in this round over the addresses
  int refused_rounds_ = 0;
  bool other_secret_ = false;
  std::string lost_why_ = "no connection was made yet";
  std::string refused_why_;  // what the peer's own address said last: a relay's troubles are not the peer's
};

}  // namespace lowcomm::tcp
