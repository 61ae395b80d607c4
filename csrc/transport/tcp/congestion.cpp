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

constexpr double kNearS = 1e-3;

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

}  // namespace

void beginCongestion(int fd) {
  set(fd, named() ? named() : "reno");
}

void judgeCongestion(int fd) {
  if (named()) return;
  const SocketReport report = reportOf(fd);
  if (report.least_round_trip_s == 0) return;
  const char* fit = report.least_round_trip_s < kNearS ? "reno" : "bbr";
  if (report.congestion != fit) set(fd, fit);
}

SocketReport reportOf(int fd) {
  SocketReport report;
  report.congestion = current(fd);
  tcp_info info{};  // an older kernel fills in less of it
  socklen_t size = sizeof(info);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return report;
  report.round_trip_s = 1e-6 * info.tcpi_rtt;
  if (info.tcpi_min_rtt != UINT32_MAX) report.least_round_trip_s = 1e-6 * info.tcpi_min_rtt;
  report.retransmitted = info.tcpi_total_retrans;
  return report;
}

void checkCongestion(int fd) {
  if (!named() || set(fd, named())) return;
  throw ValueError(
      "LOWCOMM_CONGESTION: expected a congestion control that the kernel allows "
      "(net.ipv4.tcp_allowed_congestion_control), got '" +
      std::string(named()) + "': " + std::strerror(errno));
}

}  // namespace lowcomm::tcp
