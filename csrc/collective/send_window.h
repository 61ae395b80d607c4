#pragma once

#include <array>
#include <chrono>
#include <cstddef>

namespace lowcomm {

// How many rounds of an exchange a rank sends ahead of those that have come. Too few leave a link with a long delay
// idle: one frame answers another. Too many do not fit the queue where several flows meet, and what does not is lost
// and sent again. So a group begins with few, and takes twice as many whenever what comes tells of idle time: most
// waits of a full link are alike, those of an idle one are a long one for each window, which the rest of it follows at
// the link's rate. What was learnt stays with the group: its links stay.
class SendWindow {
 public:
  static constexpr size_t kMost = 16;  // half of a short message's frames (collective/plan.h): what memory allows

  // Several peers' flows share this rank's link.
  explicit SendWindow(int peers) : rounds_(peers > 1 ? 2 : 4) {}

  size_t rounds() const { return rounds_; }

  // The time that a round's frames were waited for; not of an op's first, which waits for peers that are late.
  void waited(std::chrono::nanoseconds time);

 private:
  static constexpr size_t kSeen = 8;

  size_t rounds_;
  size_t seen_ = 0;
  std::array<std::chrono::nanoseconds, kSeen> times_{};
};

}  // namespace lowcomm
