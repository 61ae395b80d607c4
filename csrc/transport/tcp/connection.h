#pragma once

#include <poll.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/tcp/message_stream.h"
#include "transport/tcp/pace.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/wire.h"

namespace lowcomm::tcp {

using Clock = std::chrono::steady_clock;

// A pipe that carries a channel's stream in pieces, both ways, after the Hellos. Used by the endpoint's
// thread alone. Every method returns why the connection is over, or nothing; it fails no channel but over bytes that no
// peer of this version sends.
class Connection {
 public:
  // `from`: the byte of the stream out that the peer waits for.
  Connection(std::unique_ptr<Pipe> pipe, MessageStream& channel, uint64_t from, bool is_one_of_several = false);

  int fd() const { return pipe_->fd(); }

  // Reads what is there, up to a limit that leaves others their turn.
  std::optional<std::string> read();

  // Writes a piece, or what is left of one, as far as the kernel takes it.
  std::optional<std::string> write();

  // The place of what there is to write (MessageStream::send); nothing: there is nothing to write.
  std::optional<uint64_t> next();

  // Since when the kernel takes no more; unblock() when it does.
  std::optional<Clock::time_point> blocked() const { return blocked_; }
  std::optional<std::string> unblock();

  // Nothing else should be begun for so long, in the hope that the kernel takes more.
  std::chrono::milliseconds patience() const { return manner_.patience; }

  // Nothing was heard for so long that it is worth reading, whatever poll() says (Pipe::expect).
  bool isQuiet() const;

  // Heartbeats, the choice of congestion control, and whether the peer's heartbeats have stopped.
  std::optional<std::string> tick();

  // Tells the peer that the channel is at its end, if that can be said at once. Returns whether it was said.
  bool sayLast();

  // Whether the peer has said so.
  bool saidLast() const { return said_last_; }

  // Bytes, headers included.
  uint64_t sent() const { return sent_; }
  uint64_t received() const { return received_; }

  const Pipe& pipe() const { return *pipe_; }
  Pipe& pipe() { return *pipe_; }

 private:
  bool nextPiece(bool even_empty);
  std::optional<std::string> take(size_t bytes);

  const std::unique_ptr<Pipe> pipe_;
  MessageStream& channel_;
  Clock::time_point heard_ = Clock::now(), spoke_ = heard_, judge_at_ = heard_;

  uint64_t out_;  // of the stream: where the next bytes to write are
  std::array<std::byte, kPieceHeaderBytes> out_header_;
  size_t out_header_left_ = 0, out_left_ = 0;  // of the piece under way
  const bool is_one_of_several_;               // for the congestion control (pace.h)
  SendPolicy manner_ = mannerFor({});          // until it is judged
  uint64_t place_ = 0;
  uint64_t sent_ = 0, received_ = 0;
  std::optional<Clock::time_point> blocked_;

  std::array<std::byte, kPieceHeaderBytes> in_header_;
  size_t in_header_have_ = 0, in_left_ = 0;  // of the piece under way
  bool said_last_ = false;
};

// Sockets of connections that have ended here, while their last bytes are on their way to the peer. The kernel resets a
// connection that is closed with bytes unread, and drops what it has yet to send. So what the peer sends is read and
// discarded until the peer has received all bytes, has ended the connection too, or the deadline is over.
//
// Used by the endpoint's thread, or under its lock.
class LastBytes {
 public:
  void add(Fd fd, Clock::time_point deadline);
  bool empty() const { return sockets_.empty(); }
  void clear() { sockets_.clear(); }

  // Appends what to wait for; closeDone() after poll().
  void waitFor(std::vector<pollfd>& waits) const;
  void closeDone();

 private:
  struct Socket {
    Fd fd;
    Clock::time_point deadline;
  };
  std::list<Socket> sockets_;
};

}  // namespace lowcomm::tcp
