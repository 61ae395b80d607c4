#include "backend/profiler_ranges.h"

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/profiler/api.h>

#include <algorithm>
#include <chrono>

namespace lowcomm {
namespace {

using Clock = OpContext::Clock;

// The profiler that the calling thread has joined; null: none.
const void* profilerHere() {
  return c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
}

const char* nameOf(Doing doing) {
  return doing == Doing::encode ? "::encode" : doing == Doing::wait ? "::wait" : "::decode";
}

// The profiler counts in microseconds of the system's clock.
class ProfilerTime {
 public:
  int64_t of(Clock::time_point time) const {
    return std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch() + ahead_).count();
  }

 private:
  const std::chrono::nanoseconds ahead_ =
      std::chrono::system_clock::now().time_since_epoch() - Clock::now().time_since_epoch();
};

}  // namespace

std::shared_ptr<ProfilerRanges> ProfilerRanges::ofCaller(const std::string& op) {
  if (!torch::profiler::impl::profilerEnabled()) return nullptr;
  return std::shared_ptr<ProfilerRanges>(new ProfilerRanges(op, profilerHere()));
}

void ProfilerRanges::report() const {
  namespace profiler = torch::autograd::profiler;
  if (timeline_.empty()) return;            // it never ran
  if (const void* here = profilerHere()) {  // a message, finished by the thread that is profiled
    if (here == profiler_) tell();
    return;
  }
  if (!profiler::isProfilerEnabledInMainThread()) return;
  try {
    profiler::enableProfilerInChildThread();
  } catch (const c10::Error&) {
    return;  // stopped since
  }
  if (profilerHere() == profiler_) tell();
  profiler::disableProfilerInChildThread();
}

void ProfilerRanges::tell() const {
  const ProfilerTime time;
  const auto tell = [&](const std::string& name, Clock::time_point start, Clock::time_point end) {
    if (!torch::autograd::profiler::isProfilerEnabledInMainThread()) return;  // it is being stopped: see no more of it
    torch::autograd::profiler::reportBackendEventToActiveKinetoProfiler(
        time.of(start), time.of(end), /*debug_handle=*/-1, at::RecordScope::USER_SCOPE, name, "lowcomm");
  };
  Clock::time_point first = timeline_.front().start, last = timeline_.front().end;
  for (const Stretch& stretch : timeline_) {
    first = std::min(first, stretch.start);
    last = std::max(last, stretch.end);
  }
  tell(name_, first, last);
  for (const Stretch& stretch : timeline_)
    tell(name_ + nameOf(stretch.doing), stretch.start, stretch.end);
}

}  // namespace lowcomm
