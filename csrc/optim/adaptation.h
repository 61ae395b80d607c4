#pragma once

#include <cstdint>
#include <vector>

#include "optim/diloco_options.h"

namespace lowcomm {

// Rank and interval by what the averages turned out to be (DiLoCoX, arXiv 2506.21263, section 2.4.3, "adaptive
// gradient compress algorithm"): r'_t, the effective rank of outer step t's average, is the mean over its matrices of
// the least number of singular values with `energy` of the squares' sum; r_t the mean of the last `window` of them (r_1
// while there are fewer), within [min_rank, r_1]; H_t = max(min_sync_every, round(H_1·r_t/r_1)). All of it follows from
// the averages, which are the same on all ranks of a group.
class Adaptation {
 public:
  // `options` outlives this.
  explicit Adaptation(const DiLoCoXOptions& options) : options_(options) {}

  // r'_t of one more outer step.
  void add(double effective_rank) { effective_.push_back(effective_rank); }

  // r_t, not rounded. ValueError where a rule of the user's gives no number in [1, r_1].
  double rank() const;

  // H_t for that r_t. ValueError as rank(), for [1, H_1].
  int64_t syncEvery(double rank) const;

  const std::vector<double>& effectiveRanks() const { return effective_; }
  void set(std::vector<double> effective_ranks) { effective_ = std::move(effective_ranks); }

 private:
  const DiLoCoXOptions& options_;
  std::vector<double> effective_;
};

}  // namespace lowcomm
