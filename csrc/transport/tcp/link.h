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
#include "transport/tcp/pipe.h"
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

// Why a channel has failed: the peer closed it.
inline constexpr const char* kChannelClosed = "the peer has closed the channel";

// Whether a Hello went whole into a connection that was just made.
bool sendHello(Pipe& pipe, const Hello& hello);

// A channel and the connection that carries it at the moment. If the connection is lost, the dialling rank dials again,
// first at once, then twice a second. The other rank asks, by a Hello and at the same intervals, whether the peer's
// process and group still exist, because otherwise no rank would dial. They are gone, and the channel fails as closed,
// when every address has refused kRounds times in a row; silence proves nothing, and is left to the op's deadline.
//
// A rank that cannot be reached is detected: after kReverseAfter without a connection, the one that the other rank
// dials is to carry the channel (Hello::carries), and if it gets through, that rank dials from then on. If neither gets
// through for kRelayAfter, both dial a relay (Relay), over whose connection the higher rank continues as the dialling
// side, and the lower one as the accepting side.
//
// Except for the channel, used by the endpoint's thread, or under its lock.
class Link {
 public:
  explicit Link(Route route) : channel(route.peer, route.most_early), route_(std::move(route)), dials_(route_.dials) {}

  MessageStream channel;

  // Before it is used: the way to the peer is that of another channel, which has found out who dials, and whom.
  void copyRoute(const Link& other);

  const Route& route() const { return route_; }

  // For poll(): what to wait for, of the connection or of a dial; an fd below 0: nothing.
  pollfd waitsFor() const;
  void ready(short events);

  // The place of what the connection has to write, if it has; and the writing of a piece of it.
  std::optional<uint64_t> next();
  void write();

  // Since when the kernel takes no more.
  std::optional<Clock::time_point> blocked() const { return connection_ ? connection_->blocked() : std::nullopt; }

  // The longest time that this may last before other links go first.
  std::chrono::milliseconds patience() const {
    return connection_ ? connection_->patience() : std::chrono::milliseconds(0);
  }
  void tick();

  // A connection to the peer by a relay, on which it is about to say its Hello; none: an empty one.
  Fd takeJoined() { return std::move(joined_); }

  // A peer that dials has said its Hello: it is answered. Nothing is kept of one that only asks.
  void accept(std::unique_ptr<Pipe> pipe, const Hello& hello);

  // The channel is at its end on this side. Returns the socket on which the peer was told so, for the endpoint to close
  // once it has heard that; none where it was not told.
  Fd end(const std::string& why);

  // As if the peer had ended the channel.
  void fail(const std::string& why);

  // Since when there is no connection; nothing: there is one.
  std::optional<Clock::time_point> downSince() const { return connection_ ? std::nullopt : std::optional(down_since_); }

  // The number of connections made so far.
  uint64_t connections() const { return connections_; }

  // Bytes that its connections have sent, headers and what was sent again included.
  uint64_t sent() const { return past_.sent_bytes + (connection_ ? connection_->sent() : 0); }

  ConnectionReport report() const;

  // Somebody who calls himself the peer has another secret. It is only said where no connection is ever made: anybody
  // can call himself so.
  void noteOtherSecret() { other_secret_ = true; }
  bool hasOtherSecret() const { return other_secret_ && connections_ == 0; }

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
  bool wantsToCarry() const;
  bool wantsRelay() const;
  std::string pathOf(int fd) const;
  std::unique_ptr<Pipe> pipeOver(Fd fd) const;
  void relayReady();
  Identity identity() const;
  void attach(std::unique_ptr<Pipe> pipe, const Hello& hello);
  void receive();
  void drop();
  void lost(const std::string& why);
  void broken(const std::string& why);
  void dial();
  void dialReady();
  std::optional<std::string> hearAnswer();
  bool refusalsCount() const;
  void refused();  // the address has said that nobody is there
  void silent();
  void tryNext();

  Route route_;
  std::unique_ptr<Connection> connection_;
  std::optional<Dial> dial_;
  Clock::time_point dial_at_ = Clock::now();
  std::chrono::milliseconds pause_{0};  // before the next dial
  bool dials_;
  bool was_relayed_ = false;  // the last connection
  Fd joined_;
  Clock::time_point down_since_ = Clock::now();
  size_t next_address_ = 0;
  bool all_refused_ = true;  // in this round over the addresses
  int refused_rounds_ = 0;
  uint64_t connections_ = 0;
  ConnectionReport past_;  // the sums of connections that are no more
  bool ended_ = false, other_secret_ = false;
  std::string lost_why_ = "no connection was made yet";
  std::string refused_why_;  // what the peer's own address said last: a relay's troubles are not the peer's
};

}  // namespace lowcomm::tcp
