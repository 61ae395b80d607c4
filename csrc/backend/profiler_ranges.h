#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <string>

#include "collective/context.h"

namespace lowcomm {

// The profiler that a thread is under. Copies keep its memory, not its life.
class ProfilerHere {
 public:
  // Of the calling thread.
  ProfilerHere();

  // Whether one runs. Once it does not it will never again: its events are being collected, or gone.
  bool running() const;

  std::shared_ptr<c10::ThreadLocalDebugInfo> held() const { return held_; }

 private:
  std::shared_ptr<c10::ThreadLocalDebugInfo> held_;  // null where none ran
};

// What torch.profiler shows of an own op: "lowcomm::all_gather" and, inside it, "lowcomm::all_gather::encode",
// "::wait" and "::decode", on the thread that ran it.
//
// The profiler sees the thread that it was started on, and those that join it. A range that the worker opened by a
// RecordFunction would be written into the profiler's memory when it closes, which is gone where the profiler was
// stopped while an op goes on. So the op takes its times down for itself, and hands them over, begin and end, once it
// has ended and before its Work says so: whoever waits for the op and then stops the profiler has them all. An op that
// outlives the profiler that it was issued under is not shown, by no later one either.
class ProfilerRanges {
 public:
  // Null unless a profiler runs on the calling thread: nothing is then taken down.
  static std::shared_ptr<ProfilerRanges> ofCaller(const std::string& op);

  // From now on the op's stretches are taken down. This outlives the op.
  void follow(OpContext& op) { op.timeline = &timeline_; }

  // Once, when the op has ended, on the thread that ran it.
  void report() const;

 private:
  explicit ProfilerRanges(const std::string& op) : name_("lowcomm::" + op) {}

  const std::string name_;
  const ProfilerHere profiler_;  // the issuing thread's
  Timeline timeline_;
};

}  // namespace lowcomm
