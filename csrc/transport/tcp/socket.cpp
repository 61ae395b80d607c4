#include "transport/tcp/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>

#include "base/error.h"
#include "transport/tcp/pace.h"

namespace lowcomm::tcp {
namespace {

constexpr int kBacklog = 128;

// A bit for each descriptor below kCounted that an Fd owns: all that a forked child needs to close them.
constexpr int kCounted = 1 << 16;
std::atomic<uint64_t> owned[kCounted / 64];

bool isCounted(int fd) {
  return fd >= 0 && fd < kCounted;
}
constexpr uint64_t bitOf(int fd) {
  return uint64_t{1} << fd % 64;
}

void closeAll() {
  for (int at = 0; at < kCounted; at += 64) {
    for (uint64_t bits = owned[at / 64].exchange(0); bits != 0; bits &= bits - 1)
      ::close(at + std::countr_zero(bits));
  }
}

void setOption(int fd, int level, int name, int value) {
  setsockopt(fd, level, name, &value, sizeof(value));
}

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses lookUp(const std::string& host, const std::string& port, int flags, const std::string& what) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  if (const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(), port.c_str(), &hints, &found))
    throw ValueError(what + ": expected an address, got '" + joined(host, port) + "': " + gai_strerror(error));
  return {found, &freeaddrinfo};
}

constexpr size_t kMostExpected = 64 * 1024;

Moved failed() {
  if (wouldBlock()) return {};
  return {0, std::strerror(errno)};
}

}  // namespace

Fd::Fd(int fd) : fd_(fd) {
  [[maybe_unused]] static const int at_fork = ::pthread_atfork(nullptr, nullptr, &closeAll);
  if (isCounted(fd)) owned[fd / 64] |= bitOf(fd);
}

Fd::~Fd() {
  if (fd_ < 0) return;
  if (isCounted(fd_) && !(owned[fd_ / 64].fetch_and(~bitOf(fd_)) & bitOf(fd_))) return;  // a forked child has closed it
  ::close(fd_);
}

Waker::Waker() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

void Waker::wake() {
  if (awake_.exchange(true)) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(fd_.get(), &one, sizeof(one));
}

void Waker::clear(short revents) {
  if (revents) {
    uint64_t count;
    [[maybe_unused]] const ssize_t got = ::read(fd_.get(), &count, sizeof(count));
  }
  awake_ = false;  // not before: a later wake() is for the next poll()
}

bool wouldBlock() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

Moved Pipe::read(std::span<std::byte> room, size_t& turn) {
  if (ahead_begin_ < ahead_end_) {
    const size_t bytes = std::min(room.size(), ahead_end_ - ahead_begin_);
    std::memcpy(room.data(), ahead_.data() + ahead_begin_, bytes);
    ahead_begin_ += bytes;
    return {bytes};
  }
  if (turn == 0) return {};
  const size_t here = std::min(room.size(), turn);
  std::array<iovec, 2> parts{{{room.data(), here}, {ahead_.data(), ahead_.size()}}};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = reads_ahead_ ? 2 : 1;
  const ssize_t count = ::recvmsg(fd(), &message, MSG_DONTWAIT);
  if (count == 0) return {0, "the peer has closed the connection"};
  if (count < 0) return failed();
  const size_t bytes = std::min<size_t>(count, here);
  ahead_begin_ = 0;
  ahead_end_ = count - bytes;
  turn -= bytes;
  return {bytes};
}

// Without it a slow link's receiver wakes once a segment, and most of its CPU goes into that.
void Pipe::expect(size_t bytes) {
  const int expected = static_cast<int>(std::min<size_t>(bytes, kMostExpected));
  if (expected == std::exchange(expected_, expected)) return;
  ::setsockopt(fd(), SOL_SOCKET, SO_RCVLOWAT, &expected, sizeof(expected));
}

Moved Pipe::write(std::span<const iovec> parts) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  const ssize_t count = ::sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  return count < 0 ? failed() : Moved{static_cast<size_t>(count)};
}

std::pair<std::string, std::string> hostAndPort(const std::string& text, const std::string& what) {
  const size_t colon = text.rfind(':');
  std::string host = text.substr(0, colon);
  if (colon == std::string::npos || colon + 1 == text.size())
    throw ValueError(what + ": expected host:port or :port, got '" + text + "'");
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string::npos) {
    throw ValueError(what + ": expected brackets around an IPv6 address, got '" + text + "'");
  }
  return {host, text.substr(colon + 1)};
}

std::string joined(const std::string& host, const std::string& port) {
  return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + port;
}

std::string networkOf(const Address& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address.storage.ss_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address.get())->sin_addr, text.data(), text.size());
    return text.data();
  }
  in6_addr number = reinterpret_cast<const sockaddr_in6*>(address.get())->sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&number)) {
    inet_ntop(AF_INET, number.s6_addr + 12, text.data(), text.size());
    return text.data();
  }
  std::memset(number.s6_addr + 8, 0, 8);
  inet_ntop(AF_INET6, &number, text.data(), text.size());
  return text.data() + std::string("/64");
}

std::vector<Address> resolve(const std::string& text, const std::string& what) {
  const auto [host, port] = hostAndPort(text, what);
  const Addresses found = lookUp(host, port, 0, what);
  std::vector<Address> addresses;
  for (const addrinfo* one = found.get(); one; one = one->ai_next) {
    Address address;
    std::memcpy(&address.storage, one->ai_addr, one->ai_addrlen);
    address.size = one->ai_addrlen;
    addresses.push_back(address);
  }
  return addresses;
}

std::vector<std::string> localHosts(const std::string& interface) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0)
    throw ValueError(std::string("addresses of this machine: expected some, got: ") + std::strerror(errno));
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, &freeifaddrs);
  std::vector<std::string> hosts, loopback;
  std::set<std::string> names;
  for (const ifaddrs* one = all; one; one = one->ifa_next) {
    if (!one->ifa_addr || !(one->ifa_flags & IFF_UP)) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<sockaddr_in6*>(one->ifa_addr)->sin6_addr))
      continue;
    names.insert(one->ifa_name);
    if (!interface.empty() && interface != one->ifa_name) continue;
    char text[NI_MAXHOST];
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (getnameinfo(one->ifa_addr, size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0) continue;
    (one->ifa_flags & IFF_LOOPBACK ? loopback : hosts).push_back(text);
  }
  hosts.insert(hosts.end(), loopback.begin(), loopback.end());
  if (hosts.empty()) {
    std::string there;
    for (const std::string& name : names)
      there += (there.empty() ? "" : ", ") + name;
    throw ValueError("LOWCOMM_SOCKET_IFNAME or GLOO_SOCKET_IFNAME: expected an interface with an address, got '" +
                     interface + "'; this machine has " + (there.empty() ? "none" : there));
  }
  return hosts;
}

std::pair<Fd, std::string> listenOn(const std::string& host, const std::string& port, const std::string& what) {
  std::string why;
  const Addresses found = lookUp(host, port, AI_PASSIVE, what);
  // If the address means all interfaces, the IPv6 socket accepts both kinds.
  for (const int family : {AF_INET6, AF_INET}) {
    for (const addrinfo* one = found.get(); one; one = one->ai_next) {
      if (one->ai_family != family) continue;
      Fd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      if (!fd) {
        why = std::strerror(errno);
        continue;
      }
      setOption(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
      if (family == AF_INET6 && host.empty()) setOption(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
      beginCongestion(fd.get());  // of what it accepts
      Address bound;
      bound.size = sizeof(bound.storage);
      if (::bind(fd.get(), one->ai_addr, one->ai_addrlen) != 0 || ::listen(fd.get(), kBacklog) != 0 ||
          ::getsockname(fd.get(), bound.get(), &bound.size) != 0) {
        why = std::strerror(errno);
        continue;
      }
      const uint16_t number = family == AF_INET ? reinterpret_cast<sockaddr_in*>(bound.get())->sin_port
                                                : reinterpret_cast<sockaddr_in6*>(bound.get())->sin6_port;
      return {std::move(fd), std::to_string(ntohs(number))};
    }
  }
  throw ValueError(what + ": expected an address to listen on, got '" + joined(host, port) + "': " + why);
}

std::string namesOf(const std::vector<std::pair<std::string, Address>>& addresses) {
  std::string text;
  for (const auto& [name, address] : addresses)
    text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace lowcomm::tcp
