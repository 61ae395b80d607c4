#include "backend/stats.h"

#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/profiler/api.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

namespace lowcomm {

namespace {
double seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}
}  // namespace

void OpStats::add(const OpStats& other, const std::vector<uint64_t>& peers) {
  const auto addAll = [](std::map<std::string, uint64_t>& all, const std::map<std::string, uint64_t>& more) {
    for (const auto& [reason, count] : more)
      all[reason] += count;
  };
  calls += other.calls;
  exact_calls += other.exact_calls;
  addAll(exact_because, other.exact_because);
  without_units += other.without_units;
  staged_calls += other.staged_calls;
  addAll(unstaged_because, other.unstaged_because);
  raw_bytes += other.raw_bytes;
  inner_bytes += other.inner_bytes;
  wire_bytes += other.wire_bytes;
  device_to_host_bytes += other.device_to_host_bytes;
  host_to_device_bytes += other.host_to_device_bytes;
  encode_s += other.encode_s;
  wait_s += other.wait_s;
  decode_s += other.decode_s;
  for (size_t rank = 0; rank < other.wait_by_peer_s.size(); ++rank) {
    const size_t peer = rank < peers.size() ? peers[rank] : rank;
    if (wait_by_peer_s.size() <= peer) wait_by_peer_s.resize(peer + 1);
    wait_by_peer_s[peer] += other.wait_by_peer_s[rank];
  }
  loss += other.loss;
  encoded += other.encoded;
  samples += other.samples;
  addAll(forgotten, other.forgotten);
  counted = counted || other.counted;
}

std::optional<int> OpStats::straggler() const {
  const auto most = std::max_element(wait_by_peer_s.begin(), wait_by_peer_s.end());
  if (most == wait_by_peer_s.end() || *most <= 0) return std::nullopt;
  return static_cast<int>(most - wait_by_peer_s.begin());
}

std::optional<double> OpStats::relativeError() const {
  return encoded > 0 ? std::optional(std::sqrt(loss / encoded)) : std::nullopt;
}

void Stats::call(const std::string& op, bool exact) {
  std::lock_guard<std::mutex> lock(mutex_);
  OpStats& stats = ops_[op];
  stats.calls += 1;
  stats.counted = true;
  stats.exact_calls += exact;
}

bool Stats::because(const std::string& op, const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  return ops_[op].exact_because[reason]++ == 0;
}

bool Stats::withoutUnits(const std::string& op) {
  std::lock_guard<std::mutex> lock(mutex_);
  return ops_[op].without_units++ == 0;
}

void Stats::staged(const std::string& op) {
  std::lock_guard<std::mutex> lock(mutex_);
  ops_[op].staged_calls += 1;
}

bool Stats::unstaged(const std::string& op, const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  return ops_[op].unstaged_because[reason]++ == 0;
}

void Stats::inner(const std::string& op, uint64_t raw_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  OpStats& stats = ops_[op];
  stats.calls += 1;
  stats.exact_calls += 1;
  stats.raw_bytes += raw_bytes;
  stats.inner_bytes += raw_bytes;
}

void Stats::moved(const std::string& op, const OpCounters& counters) {
  std::lock_guard<std::mutex> lock(mutex_);
  OpStats& stats = ops_[op];
  stats.raw_bytes += counters.raw_bytes;
  stats.wire_bytes += counters.wire_bytes;
  stats.device_to_host_bytes += counters.device_to_host_bytes;
  stats.host_to_device_bytes += counters.host_to_device_bytes;
  stats.encode_s += seconds(counters.encode);
  stats.wait_s += seconds(counters.wait);
  stats.decode_s += seconds(counters.decode);
  stats.wait_by_peer_s.resize(std::max(stats.wait_by_peer_s.size(), counters.wait_by_peer.size()));
  for (size_t rank = 0; rank < counters.wait_by_peer.size(); ++rank)
    stats.wait_by_peer_s[rank] += seconds(counters.wait_by_peer[rank]);
  stats.loss += counters.loss.lost;
  stats.encoded += counters.loss.whole;
  stats.samples += counters.samples;
}

void Stats::forgot(const std::string& op, const std::string& why, uint64_t samples) {
  std::lock_guard<std::mutex> lock(mutex_);
  ops_[op].forgotten[why] += samples;
}

std::map<std::string, OpStats> Stats::snapshot() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return ops_;
}

void Stats::reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  ops_.clear();
}

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
