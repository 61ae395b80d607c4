#include "transport/tcp/congestion.h"

#include <linux/tcp.h>  // the C library's tcp_info ends before the least round trip
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"

namespace lowcomm::tcp {
namespace {

constexpr uint32_t kNearMicroseconds = 1000;

const char* named() {
  const char* name = std::getenv("LOWCOMM_CONGESTION");
  return name && *name ? name : nullptr;
}

bool set(int fd, const char* name) {
  return ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, static_cast<socklen_t>(std::strlen(name))) == 0;
}

std::string current(int fd) {
  std::array<char, 16> name{};
  socklen_t size = name.size();
  if (::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) != 0) return {};
  return {name.data(), ::strnlen(name.data(), name.size())};
}

// Microseconds; 0 where the kernel does not say.
uint32_t leastRoundTrip(int fd) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  const bool says = size >= offsetof(tcp_info, tcpi_min_rtt) + sizeof(info.tcpi_min_rtt);
  return says ? info.tcpi_min_rtt : 0;
}

}  // namespace

void beginCongestion(int fd) {
  set(fd, named() ? named() : "reno");
}

void judgeCongestion(int fd) {
  if (named()) return;
  const uint32_t microseconds = leastRoundTrip(fd);
  if (microseconds == 0) return;
  const char* fit = microseconds < kNearMicroseconds ? "reno" : "bbr";
  if (current(fd) != fit) set(fd, fit);
}

void checkCongestion(int fd) {
  if (!named() || set(fd, named())) return;
  throw ValueError(
      "LOWCOMM_CONGESTION: expected a congestion control that the kernel allows "
      "(net.ipv4.tcp_allowed_congestion_control), got '" +
      std::string(named()) + "': " + std::strerror(errno));
}

}  // namespace lowcomm::tcp
