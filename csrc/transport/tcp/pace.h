#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace lowcomm::tcp {

// How fast the bulk lanes of a process may send, all together, on a link that it shares: LOWCOMM_RATE. Used by the
// endpoint's thread alone.
class Pace {
 public:
  using Clock = std::chrono::steady_clock;

  // "50mbit": a number and kbit, mbit or gbit a second; empty: no bound. ValueError naming LOWCOMM_RATE.
  explicit Pace(const std::string& rate);

  // For how long nothing may be sent; 0: something may.
  Clock::duration wait() const;

  void sent(size_t bytes);

 private:
  double s_a_byte_ = 0;
  Clock::time_point next_{};  // when what was sent will have left at the rate
};

}  // namespace lowcomm::tcp
