#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace lowcomm::tcp {

// A file descriptor that is closed with its owner; -1: none. A forked child closes its copies at once, so that peers
// see the connection close when the parent ends, even while the child lives.
class Fd {
 public:
  explicit Fd(int fd = -1);
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

// Wakes a thread that waits in poll(). Thread-safe.
class Waker {
 public:
  Waker();

  pollfd waitsFor() const { return {fd_.get(), POLLIN, 0}; }

  // poll() returns at once, until the thread has called clear() with the `revents` that poll() set. What was done
  // before wake() is visible after clear().
  void wake();
  void clear(short revents);

 private:
  const Fd fd_;
  std::atomic<bool> awake_{false};
};

// After a call on a socket that does not block: whether it may do better later.
bool wouldBlock();

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

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

// "host:port", "[v6 address]:port" or ":port" as host and port; host without brackets. ValueError naming `what`.
std::pair<std::string, std::string> hostAndPort(const std::string& text, const std::string& what);

// The network that an address is one of, as text: an IPv4 address, or the first half of an IPv6 one, for a host has the
// other half to itself.
std::string networkOf(const Address& address);

// The other way round.
std::string joined(const std::string& host, const std::string& port);

// The addresses of a name or a number. ValueError naming `what` if it has no address.
std::vector<Address> resolve(const std::string& text, const std::string& what);

// The texts of addresses, with commas between them.
std::string namesOf(const std::vector<std::pair<std::string, Address>>& addresses);

// This machine's addresses that others may reach, as text; of one interface where it is named. Loopback last, and only
// where no interface is named. ValueError where an interface has none.
std::vector<std::string> localHosts(const std::string& interface);

// A socket that listens, not blocking, on all interfaces where `host` is empty; and its port. ValueError naming
// `what` where it cannot.
std::pair<Fd, std::string> listenOn(const std::string& host, const std::string& port, const std::string& what);

}  // namespace lowcomm::tcp
