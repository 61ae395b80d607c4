#include "codec/level_table.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/float_env.h"
#include "codec/spec.h"
#include "kernels/finite.h"

namespace lowcomm {
namespace {

// Compared by their bits, which are in the order of the values from 0 up: a caller that flushes subnormal numbers has
// the same tables as one that does not.
int32_t order(float x) {
  return std::bit_cast<int32_t>(x);
}

std::string text(float x) {
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof(digits), x).ptr};
}

template <typename T>
T number(std::string_view digits, std::string_view whole) {
  T value{};
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size()) {
    throw ValueError("level table: expected '<version>:<value>,<value>,...', got '" + std::string(whole) + "'");
  }
  return value;
}

}  // namespace

LevelTable::LevelTable(std::vector<float> values, uint32_t version) : values_(std::move(values)), version_(version) {
  const size_t count = values_.size();
  if (count < 2 || count > 256 || !std::has_single_bit(count)) {
    throw ValueError("level table: expected 2, 4, 8, ... or 256 values, got " + std::to_string(count));
  }
  if ((order(values_.front()) & 0x7fffffff) == 0) values_.front() = 0;    // +0, also for -0
  if (order(values_.front()) < 0 || order(values_.front()) > order(1)) {  // NaN is above 1
    throw ValueError("level table: value 0: expected one in 0...1, got " + text(values_.front()));
  }
  for (size_t i = 1; i < count; ++i) {
    if (order(values_[i]) > order(values_[i - 1]) && order(values_[i]) <= order(1)) continue;
    throw ValueError("level table: value " + std::to_string(i) + ": expected one above " + text(values_[i - 1]) +
                     " and at most 1, got " + text(values_[i]));
  }
}

LevelTable LevelTable::even(int bits) {
  const int last = (1 << bits) - 1;
  std::vector<float> values;
  for (int i = 0; i <= last; ++i)
    values.push_back(static_cast<float>(i) / static_cast<float>(last));
  return LevelTable(std::move(values));
}

std::string LevelTable::str() const {
  std::string out = std::to_string(version_);
  for (size_t i = 0; i < values_.size(); ++i)
    out += (i == 0 ? ":" : ",") + text(values_[i]);
  return out;
}

LevelTable LevelTable::parse(std::string_view whole) {
  const size_t colon = std::min(whole.find(':'), whole.size());
  const auto version = number<uint32_t>(whole.substr(0, colon), whole);
  std::vector<float> values;
  for (size_t at = colon; at < whole.size();) {
    const size_t end = std::min(whole.find(',', at + 1), whole.size());
    values.push_back(number<float>(whole.substr(at + 1, end - at - 1), whole));
    at = end;
  }
  return LevelTable(std::move(values), version);
}

int LevelTable::bits() const {
  return std::countr_zero(values_.size());
}

// ---- learning ----
namespace {

constexpr size_t kLanes = 16;

// Partial sums of a level, element i in sum i mod 4: neighbours of the same level need not wait for each other.
constexpr size_t kSums = 4;

// The number of thresholds strictly below t, of which there are 2^bits - 1: a search without branches, for a value's
// level is what no predictor knows.
size_t codeOf(const float* thresholds, int bits, float t) {
  size_t code = 0;
  for (size_t half = size_t{1} << (bits - 1); half > 0; half >>= 1)
    code += thresholds[code + half - 1] < t ? half : 0;
  return code;
}

bool increases(const std::vector<float>& levels) {
  return std::adjacent_find(levels.begin(), levels.end(), [](float a, float b) { return !(a < b); }) == levels.end();
}

}  // namespace

LevelLearning::LevelLearning(const LevelTable& start, uint32_t bucket)
    : bits_(start.bits()),
      bucket_(bucket),
      levels_(start.values().begin(), start.values().end()),
      thresholds_(levels_.size() - 1),
      kept_{1.0},
      batch_(kBatch) {
  if (bucket != kTensorBucket && !isGridBucket(bucket)) {
    throw ValueError(std::string("level learning: bucket: expected ") + gridBuckets(false) + " or " +
                     std::to_string(kTensorBucket) + ", got " + std::to_string(bucket));
  }
  for (size_t n = 1; n <= kBatch; ++n)
    kept_.push_back(kept_.back() * (1.0 - kRate));  // not pow, whose last bit is the library's own
}

void LevelLearning::see(const float* x, uint64_t count) {
  FloatEnv env;
  seeGuarded(x, count);
}

// Not inlined: the compiler would move arithmetic across FloatEnv.
[[gnu::noinline]] void LevelLearning::seeGuarded(const float* x, uint64_t count) {
  const uint64_t bucket = bucket_ == kTensorBucket ? std::max<uint64_t>(count, 1) : bucket_;
  for (uint64_t first = 0; first < count; first += bucket)
    bucketOf(x + first, std::min(bucket, count - first));
  if (batched_ > 0) learn();  // a run's last values count as a small batch
}

void LevelLearning::bucketOf(const float* x, uint64_t count) {
  // In lanes, which compilers make vectors of: min and max are the same in any order.
  float low[kLanes], high[kLanes];
  uint32_t refused = 0;
  std::fill_n(low, kLanes, x[0]);
  std::fill_n(high, kLanes, x[0]);
  for (uint64_t i = 0; i < count / kLanes * kLanes; i += kLanes) {
    for (size_t k = 0; k < kLanes; ++k) {
      const float value = x[i + k];
      refused |= std::fabs(value) < kFiniteLimit ? 0 : 1;  // NaN is not
      low[k] = value < low[k] ? value : low[k];
      high[k] = high[k] < value ? value : high[k];
    }
  }
  for (uint64_t i = count / kLanes * kLanes; i < count; ++i) {
    refused |= std::fabs(x[i]) < kFiniteLimit ? 0 : 1;
    low[0] = std::min(low[0], x[i]);
    high[0] = std::max(high[0], x[i]);
  }
  const float base = *std::min_element(low, low + kLanes);
  const float inverse = 1.0f / (*std::max_element(high, high + kLanes) - base);
  if (refused != 0 || std::isinf(inverse)) return;
  for (uint64_t i = 0; i < count;) {
    const size_t now = std::min<uint64_t>(count - i, kBatch - batched_);
    for (size_t k = 0; k < now; ++k)
      batch_[batched_ + k] = (x[i + k] - base) * inverse;
    batched_ += now;
    i += now;
    if (batched_ == kBatch) learn();
  }
  seen_ += count;
}

void LevelLearning::learn() {
  for (size_t i = 0; i < thresholds_.size(); ++i)
    thresholds_[i] = (levels_[i] + levels_[i + 1]) * 0.5f;
  double sums[kSums][256] = {};
  uint32_t counts[kSums][256] = {};
  for (size_t i = 0; i < batched_; ++i) {
    const size_t code = codeOf(thresholds_.data(), bits_, batch_[i]);
    sums[i % kSums][code] += batch_[i];
    ++counts[i % kSums][code];
  }
  batched_ = 0;
  std::vector<float> moved = levels_;
  for (size_t i = 0; i < levels_.size(); ++i) {
    const uint32_t n = (counts[0][i] + counts[1][i]) + (counts[2][i] + counts[3][i]);
    if (n == 0) continue;
    const double sum = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    const double q = levels_[i];
    const double to = q + (1.0 - kept_[n]) * (sum / n - q);
    moved[i] = std::min(static_cast<float>(to), 1.0f);  // a quotient by the rounded range may be just above 1
  }
  // Between thresholds a level only meets its neighbour by rounding; such a batch teaches nothing.
  if (increases(moved)) levels_ = std::move(moved);
}

namespace {

[[gnu::noinline]] LevelTable meanGuarded(std::span<const LevelTable> tables, std::span<const uint64_t> seen,
                                         const LevelTable& otherwise, uint32_t version) {
  const size_t count = otherwise.values().size();
  std::vector<double> sum(count);
  double weight = 0;
  for (size_t rank = 0; rank < tables.size(); ++rank) {
    const auto share = static_cast<double>(seen[rank]);
    weight += share;
    for (size_t i = 0; i < count; ++i)
      sum[i] += share * tables[rank].values()[i];
  }
  std::vector<float> mean(otherwise.values().begin(), otherwise.values().end());
  if (weight == 0) return LevelTable(mean, version);
  std::vector<float> old = mean;
  for (size_t i = 0; i < count; ++i)
    mean[i] = static_cast<float>(sum[i] / weight);
  return LevelTable(increases(mean) ? mean : old, version);
}

}  // namespace

LevelTable meanOf(std::span<const LevelTable> tables, std::span<const uint64_t> seen, const LevelTable& otherwise,
                  uint32_t version) {
  if (tables.size() != seen.size()) {
    throw ValueError("level tables: expected as many weights as tables, " + std::to_string(tables.size()) + ", got " +
                     std::to_string(seen.size()));
  }
  for (const LevelTable& table : tables) {
    if (table.bits() == otherwise.bits()) continue;
    throw ValueError("level tables: expected " + std::to_string(otherwise.values().size()) + " values, got " +
                     std::to_string(table.values().size()));
  }
  FloatEnv env;
  return meanGuarded(tables, seen, otherwise, version);
}

}  // namespace lowcomm
