#include "backend/profiler_ranges.h"

#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/profiler/api.h>

#include <algorithm>
#include <chrono>

namespace lowcomm {
namespace {

using Clock = OpContext::Clock;

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
  return std::shared_ptr<ProfilerRanges>(new ProfilerRanges(op));
}

void ProfilerRanges::report(const at::ThreadLocalState& caller) const {
  if (timeline_.empty()) return;  // it never ran
  const at::ThreadLocalStateGuard restored(caller);
  const ProfilerTime time;
  const auto tell = [&](const std::string& name, Clock::time_point start, Clock::time_point end) {
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
