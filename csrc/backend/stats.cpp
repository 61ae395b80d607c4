#include "backend/stats.h"

namespace lowcomm {
namespace {
double seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}
}  // namespace

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
  stats.encode_s += seconds(counters.encode);
  stats.wait_s += seconds(counters.wait);
  stats.decode_s += seconds(counters.decode);
}

std::map<std::string, OpStats> Stats::snapshot() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return ops_;
}

void Stats::reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  ops_.clear();
}

}  // namespace lowcomm
