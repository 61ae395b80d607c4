#include "transport/tcp/pace.h"

#include <linux/tcp.h>  // the C library's tcp_info ends before the least round trip
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>

#include "base/error.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/wire.h"

namespace lowcomm::tcp {
namespace {

using namespace std::chrono_literals;

// A thread that was late may make up for so much.
constexpr auto kCredit = 2ms;

constexpr double kNearS = 1e-3;
constexpr double kMomentS = 250e-6;
constexpr double kFarS = 5e-3;  // of which 0.1 % of the segments lost leave a connection 90 Mbit/s

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

SendPolicy mannerFor(const SocketReport& report, bool is_one_of_several) {
  const bool is_near = report.least_round_trip_s < kNearS;
  const double full = kMomentS * report.delivered_a_s / kShortPieceBytes;
  constexpr double kMostTimes = kPieceBytes / kShortPieceBytes;
  const char* far = is_one_of_several ? "cubic" : "bbr";
  return {is_near ? "reno" : far, kShortPieceBytes * static_cast<size_t>(std::clamp(full, 1.0, kMostTimes)),
          is_near ? 20ms : 2ms};
}

SendPolicy judge(int fd, bool is_one_of_several) {
  const SocketReport report = reportOf(fd);
  const SendPolicy manner = mannerFor(report, is_one_of_several);
  if (!named() && report.least_round_trip_s > 0 && report.congestion != manner.congestion) set(fd, manner.congestion);
  return manner;
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
  report.delivered_a_s = static_cast<double>(info.tcpi_delivery_rate);
  report.acknowledged_bytes = info.tcpi_bytes_acked;
  report.busy_s = 1e-6 * static_cast<double>(info.tcpi_busy_time - info.tcpi_rwnd_limited);
  return report;
}

void checkCongestion(int fd) {
  if (!named() || set(fd, named())) return;
  throw ValueError(
      "LOWCOMM_CONGESTION: expected a congestion control that the kernel allows "
      "(net.ipv4.tcp_allowed_congestion_control), got '" +
      std::string(named()) + "': " + std::strerror(errno));
}

bool isLossBased() {
  const std::string name = named() ? named() : "bbr";
  if (!name.starts_with("bbr")) return true;
  return !set(Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)).get(), name.c_str());
}

int connectionsOver(double least_round_trip_s, int group_size) {
  if (least_round_trip_s < kFarS) return 1;
  return std::clamp(kFarConnectionsOfARank / std::max(1, group_size - 1), 1, kFarConnections);
}

Pace::Pace(const std::string& rate) {
  if (rate.empty()) return;
  static const std::map<std::string, double> units{{"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}};
  char* end = nullptr;
  const double number = std::strtod(rate.c_str(), &end);
  const auto unit = units.find(end);
  if (unit == units.end() || !std::isfinite(number) || number * unit->second < 1e3) {
    throw ValueError("LOWCOMM_RATE: expected a number and kbit, mbit or gbit, at least 1kbit, got '" + rate + "'");
  }
  s_a_byte_ = 8 / (number * unit->second);
}

Pace::Clock::duration Pace::wait() const {
  return s_a_byte_ == 0 ? 0ms : std::max<Clock::duration>(0ms, next_ - Clock::now());
}

void Pace::sent(size_t bytes) {
  if (s_a_byte_ == 0) return;
  const std::chrono::duration<double> time(s_a_byte_ * static_cast<double>(bytes));
  next_ =
      std::max<Clock::time_point>(next_, Clock::now() - kCredit) + std::chrono::duration_cast<Clock::duration>(time);
}

}  // namespace lowcomm::tcp
