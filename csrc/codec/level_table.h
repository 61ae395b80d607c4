#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lowcomm {

// The 2^b values that a `levels<b>` codec rounds to, as fractions of a bucket's range from its minimum on (QSDP's
// learned levels). It travels apart from the payloads; `version` says which one a frame was
// encoded with.
class LevelTable {
 public:
  // Throws ValueError naming what is wrong: not 2, 4, ... or 256 values, one outside 0...1, one that is not above the
  // one before it. The ends need not be 0 and 1: a level that serves a bucket's extreme and nothing else is wasted.
  explicit LevelTable(std::vector<float> values, uint32_t version = 0);

  // i / (2^bits - 1), version 0: what learning starts from.
  static LevelTable even(int bits);

  // "<version>:<value>,<value>,...", each value as its shortest decimal: parse(str()) == *this. Throws ValueError.
  std::string str() const;
  static LevelTable parse(std::string_view text);

  std::span<const float> values() const { return values_; }
  int bits() const;
  uint32_t version() const { return version_; }

  bool operator==(const LevelTable&) const = default;

 private:
  std::vector<float> values_;
  uint32_t version_;
};

// Learns the levels of a `levels<b>` codec from what it is to encode (QSDP, arXiv 2302.02390, Algorithm 2). Each bucket
// is normalised to 0...1 as the codec does; a value v moves its nearest level q by -rate·(q - v). A mini-batch's n
// values of one level move it together by what n such moves towards their mean come to, q += (1 - (1 - rate)^n)(mean -
// q): adding n pulls of the same old level would overshoot where levels are few. Levels stay between their thresholds,
// so they stay sorted. The ends are free.
//
// The same elements give the same bits on every machine: float thresholds, and in a batch four sums in double a level,
// element i in sum i mod 4, added as (0 + 1) + (2 + 3).
class LevelLearning {
 public:
  static constexpr size_t kBatch = 1024;
  static constexpr double kRate = 0.01;

  // From `start`'s levels on. `bucket`: elements of a bucket, kTensorBucket (codec/spec.h) for one a run.
  LevelLearning(const LevelTable& start, uint32_t bucket);

  // The `count` elements at `x`, in order: one run whose buckets count from its first element. Buckets that the codec
  // would refuse or that have no range are passed over: nothing is to be learned from them.
  void see(const float* x, uint64_t count);

  // Elements learned from so far.
  uint64_t seen() const { return seen_; }

  LevelTable table(uint32_t version) const { return LevelTable(levels_, version); }

 private:
  void seeGuarded(const float* x, uint64_t count);
  void bucketOf(const float* x, uint64_t count);
  void learn();

  int bits_;
  uint32_t bucket_;
  std::vector<float> levels_, thresholds_;
  std::vector<double> kept_;  // by n: (1 - rate)^n
  std::vector<float> batch_;  // the first `batched_` are filled
  size_t batched_ = 0;
  uint64_t seen_ = 0;
};

// The table that ranks agree on after they learned from different shards: the mean of their levels, each weighted by
// the elements it was learned from, summed in the order given; `otherwise` where none has learned or two means round to
// one. Throws ValueError where tables differ in size or their number is not that of the weights.
LevelTable meanOf(std::span<const LevelTable> tables, std::span<const uint64_t> seen, const LevelTable& otherwise,
                  uint32_t version);

}  // namespace lowcomm
