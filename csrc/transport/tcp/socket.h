#pragma once

#include <sys/socket.h>

#include <cstddef>
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

// After a call on a socket that does not block: whether it may do better later.
bool wouldBlock();

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
