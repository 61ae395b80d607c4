#include "collective/send_window.h"

#include <algorithm>
#include <numeric>

namespace lowcomm {

void SendWindow::waited(std::chrono::nanoseconds time) {
  times_[seen_++] = time;
  if (seen_ < kSeen) return;
  seen_ = 0;
  const auto sum = std::accumulate(times_.begin(), times_.end(), std::chrono::nanoseconds{0});
  if (sum < kSeen * std::chrono::microseconds(500)) return;  // a fast link, or a codec that it waits for
  // The lower quartile is about the time of a frame on the link: that many of them fill this share of what was waited.
  std::nth_element(times_.begin(), times_.begin() + kSeen / 4, times_.end());
  if (2 * kSeen * times_[kSeen / 4] < sum) rounds_ = std::min(2 * rounds_, kMost);
}

}  // namespace lowcomm
