#include "backend/stats.h"

#include <algorithm>
#include <cmath>

namespace lowcomm {
namespace {
double seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}
}  // namespace

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

void Stats::forgot(const std::string& op, uint64_t samples) {
  std::lock_guard<std::mutex> lock(mutex_);
  ops_[op].forgotten += samples;
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
