#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace lowcomm {

// How many rounds of an exchange a rank sends ahead of those that have come. Too few leave a link with a long delay
// idle: one frame answers another. Too many do not fit the queue where several flows meet, and what does not is lost
// and sent again. So a group begins with few, and tries twice as many when what comes tells of idle time: waits of a
// full link are alike, those of an idle one are a long one for each window, which the rest of it follows at the link's
// rate. More is kept if more came of it, as it does of a delay; flows that disturb each other look idle too, and gain
// nothing. What was learnt stays with the group: its links stay.
class SendWindow {
 public:
  static constexpr size_t kMost = 16;  // half of a short message's frames (collective/plan.h): what memory allows

  // Several peers' flows share this rank's link.
  explicit SendWindow(int peers) : rounds_(peers > 1 ? 2 : 4) {}

  size_t rounds() const { return rounds_; }

  // The time that a round's frames were waited for, and their bytes; not of an op's first, which waits for peers that
  // are late.
  void waited(std::chrono::nanoseconds time, uint64_t bytes);

 private:
  static constexpr size_t kSeen = 8;  // rounds that are looked at together
  static constexpr size_t kRest = 8;  // times that many until it is tried again, twice as long after every failure

  bool idle(std::chrono::nanoseconds sum);
  void judge(double rate);

  size_t rounds_;
  size_t tried_from_ = 0;  // what a trial began with; 0: none
  bool settling_ = false;  // what comes was still sent before the trial
  double rate_before_ = 0;
  size_t rest_ = 0, next_rest_ = kRest;
  size_t seen_ = 0;
  uint64_t bytes_ = 0;
  std::array<std::chrono::nanoseconds, kSeen> times_{};
};

}  // namespace lowcomm
