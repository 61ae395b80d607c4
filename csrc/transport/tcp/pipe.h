#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "transport/tcp/socket.h"

namespace lowcomm::tcp {

// The outcome of a call on a pipe. Neither bytes nor a reason: the socket has, or takes, no more at the moment.
struct Moved {
  size_t bytes = 0;
  std::optional<std::string> over = {};  // why the pipe is at its end
};

// The bytes of a connected socket that never blocks, both ways. Here they travel as they are; a pipe that changes them
// on their way derives from this one.
class Pipe {
 public:
  explicit Pipe(Fd fd) : fd_(std::move(fd)) {}
  virtual ~Pipe() = default;

  int fd() const { return fd_.get(); }

  // The socket, for another pipe; this one is of no use afterwards.
  Fd release() { return std::move(fd_); }

  // Whether bytes can be written and read. Until then open() does what that needs, as far as the socket allows it, and
  // returns why it cannot be, or nothing.
  virtual bool isOpen() const { return true; }
  virtual std::optional<std::string> open() { return {}; }

  // Why open() failed, if the other end is to blame: it is another process than the one that is meant, or it has
  // another secret.
  enum class Wrong { nothing, process, secret };
  virtual Wrong wrong() const { return Wrong::nothing; }

  // Reads into `room`, which is not empty. `turn`: how many bytes the socket may still be asked for, before others have
  // their turn; it counts down. Until this returns no bytes, there may be some that poll() does not know of.
  virtual Moved read(std::span<std::byte> room, size_t& turn);

  // From now on read() asks the socket for a little more than `room`, as short headers and words follow each message.
  // Not before it is known that no other pipe takes this one's socket.
  void readAhead() { reads_ahead_ = true; }

  // Takes what it can of `parts`, in order, and touches them no more afterwards.
  virtual Moved write(std::span<const iovec> parts);

  // Whether bytes that write() or open() has taken wait for the kernel to take them; flush() offers them again.
  virtual bool holds() const { return false; }
  virtual std::optional<std::string> flush() { return {}; }

  // Hint: nothing can be done before so many bytes have come, so that poll() need not say so earlier. At least 1.
  virtual void expect(size_t bytes);

  virtual std::string cipher() const { return {}; }

 private:
  Fd fd_;
  int expected_ = 1;
  bool reads_ahead_ = false;
  std::array<std::byte, 512> ahead_;  // headers and words, which are short
  size_t ahead_begin_ = 0, ahead_end_ = 0;
};

}  // namespace lowcomm::tcp
