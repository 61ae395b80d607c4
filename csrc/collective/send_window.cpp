#include "collective/send_window.h"

#include <algorithm>
#include <numeric>

namespace lowcomm {
namespace {

constexpr double kWorthIt = 1.1;  // times the rate before
constexpr std::chrono::microseconds kShort{500};

}  // namespace

void SendWindow::waited(std::chrono::nanoseconds time, uint64_t bytes) {
  times_[seen_++] = time;
  bytes_ += bytes;
  if (seen_ < kSeen) return;
  const auto sum = std::accumulate(times_.begin(), times_.end(), std::chrono::nanoseconds{0});
  const double rate = static_cast<double>(bytes_) / static_cast<double>(std::max<int64_t>(sum.count(), 1));
  seen_ = 0;
  bytes_ = 0;
  if (settling_) {
    settling_ = false;
  } else if (tried_from_ > 0) {
    judge(rate);
  } else if (rest_ > 0) {
    --rest_;
  } else if (rounds_ < kMost && idle(sum)) {
    tried_from_ = rounds_;
    rate_before_ = rate;
    rounds_ = std::min(2 * rounds_, kMost);
    settling_ = true;
  }
}

bool SendWindow::idle(std::chrono::nanoseconds sum) {
  if (sum < kSeen * kShort) return false;  // a fast link, or one that waits for the codec
  // The lower quartile is about the time of a frame on the link: that many of them fill less than half of the waits.
  std::nth_element(times_.begin(), times_.begin() + kSeen / 4, times_.end());
  return 2 * kSeen * times_[kSeen / 4] < sum;
}

void SendWindow::judge(double rate) {
  if (rate >= kWorthIt * rate_before_) {
    next_rest_ = kRest;
  } else {
    rounds_ = tried_from_;
    rest_ = next_rest_;
    next_rest_ = std::min<size_t>(2 * next_rest_, 1024);
  }
  tried_from_ = 0;
}

}  // namespace lowcomm
