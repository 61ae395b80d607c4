#pragma once

#include <ATen/ThreadLocalState.h>

#include <memory>
#include <string>

#include "collective/context.h"

namespace lowcomm {

// What torch.profiler shows of an own op: "lowcomm::all_gather" and, inside it, "lowcomm::all_gather::encode",
// "::wait" and "::decode", on the thread that ran it.
//
// The profiler sees the threads that it was started on, and others under the state of one of those. A range that the
// worker opened by a RecordFunction under that state would be written into the profiler's memory when it closes, which
// is gone where the profiler was stopped while an op goes on. So the op takes its times down for itself, and hands them
// over, begin and end, once it has ended and before its Work says so: whoever waits for the op and then stops the
// profiler has them all.
class ProfilerRanges {
 public:
  // Null unless a profiler runs on the calling thread: nothing is then taken down.
  static std::shared_ptr<ProfilerRanges> ofCaller(const std::string& op);

  // From now on the op's stretches are taken down. This outlives the op.
  void follow(OpContext& op) { op.timeline = &timeline_; }

  void add(const Stretch& stretch) { timeline_.push_back(stretch); }

  // Once, when the op has ended: to the profiler that `caller`, the issuing thread's state, names.
  void report(const at::ThreadLocalState& caller) const;

 private:
  explicit ProfilerRanges(const std::string& op) : name_("lowcomm::" + op) {}

  const std::string name_;
  Timeline timeline_;
};

}  // namespace lowcomm
