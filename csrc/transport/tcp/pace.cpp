#include "transport/tcp/pace.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>

#include "base/error.h"

namespace lowcomm::tcp {
namespace {

using namespace std::chrono_literals;

// What a thread that was late may make up for.
constexpr auto kCredit = 2ms;

}  // namespace

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
