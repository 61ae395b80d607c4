#include "backend/profiler_ranges.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/profiler/api.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace lowcomm {
namespace {

using Clock = OpContext::Clock;

// While it lives the calling thread reports to the profiler that `profiled` holds. Not by
// enableProfilerInChildThread(): that replaces the callback that the profiler will remove from its own thread when it
// stops, and the one that is left there shows everything twice to all profilers after it.
class ProfilerScope {
 public:
  explicit ProfilerScope(std::shared_ptr<c10::ThreadLocalDebugInfo> profiled)
      : own_(c10::ThreadLocalDebugInfo::current()) {
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(profiled));
  }
  ~ProfilerScope() { c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(own_)); }
  ProfilerScope(const ProfilerScope&) = delete;
  ProfilerScope& operator=(const ProfilerScope&) = delete;

 private:
  std::shared_ptr<c10::ThreadLocalDebugInfo> own_;
};

// The calling thread's profiler, or null: get(false) before torch 2.14.
template <class State>
const State* profilerOfThread() {
  if constexpr (requires { State::getTLS(); }) {
    return State::getTLS();
  } else {
    return State::get(/*global=*/false);
  }
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

ProfilerHere::ProfilerHere() {
  if (torch::profiler::impl::profilerEnabled()) held_ = c10::ThreadLocalDebugInfo::current();
}

// A profiler that stops removes its callback first, and collects its events, from every thread's memory, after that.
bool ProfilerHere::running() const {
  struct Profiler : torch::profiler::impl::ProfilerStateBase {
    static bool runs(const ProfilerStateBase& state) { return state.*(&Profiler::handle_) != 0; }
  };
  if (!held_) return false;
  const ProfilerScope joined(held_);
  const auto* state = profilerOfThread<torch::profiler::impl::ProfilerStateBase>();
  return state && Profiler::runs(*state);
}

std::shared_ptr<ProfilerRanges> ProfilerRanges::ofCaller(const std::string& op) {
  if (!torch::profiler::impl::profilerEnabled()) return nullptr;
  return std::shared_ptr<ProfilerRanges>(new ProfilerRanges(op));
}

void ProfilerRanges::report() const {
  if (timeline_.empty()) return;  // it never ran
  const ProfilerScope joined(profiler_.held());
  const ProfilerTime time;
  const auto tell = [&](const std::string& name, Clock::time_point start, Clock::time_point end) {
    if (!profiler_.running()) return;
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
