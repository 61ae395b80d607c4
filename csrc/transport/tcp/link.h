#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "transport/tcp/connection.h"
#include "transport/tcp/dialer.h"
#include "transport/tcp/message_stream.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/wire.h"

namespace lowcomm::tcp {

// Why a channel has failed: the peer closed it.
inline constexpr const char* kChannelClosed = "the peer has closed the channel";

// A channel, the connection that carries it at the moment, and the dialer that makes another one when that is lost. The
// channel fails as closed when the dialer finds that the peer is gone, or the peer says that it has ended the channel.
//
// Except for the channel, used by the endpoint's thread, or under its lock.
class Link {
 public:
  explicit Link(Route route) : channel(route.peer, route.most_early), dialer_(std::move(route), channel) {}

  MessageStream channel;

  const Route& route() const { return dialer_.route(); }
  Dialer& dialer() { return dialer_; }

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

  // A peer that dials has sent its Hello, which is answered. The pipe is closed if it only asks.
  void accept(std::unique_ptr<Pipe> pipe, const Hello& hello);

  // Closes the channel and tells the peer `why`. Returns the socket that carried the message, which the endpoint closes
  // once the peer has read it; empty if the peer could not be told.
  Fd end(const std::string& why);

  // As if the peer had ended the channel.
  void fail(const std::string& why);

  // Whether there is a connection; the number of connections made so far.
  bool isConnected() const { return connection_ != nullptr; }
  uint64_t connections() const { return connections_; }

  // Bytes that its connections have sent, headers and what was sent again included.
  uint64_t sent() const { return past_.sent_bytes + (connection_ ? connection_->sent() : 0); }

  ConnectionReport report() const;

 private:
  void take(Dialer::Outcome outcome);
  void attach(std::unique_ptr<Pipe> pipe, const Hello& hello);
  void receive();
  void drop();
  void lost(const std::string& why);
  void broken(const std::string& why);

  Dialer dialer_;
  std::unique_ptr<Connection> connection_;
  uint64_t connections_ = 0;
  ConnectionReport past_;  // the sums of connections that are no more
  bool ended_ = false;
};

}  // namespace lowcomm::tcp
