#include "optim/adaptation.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "base/error.h"

namespace lowcomm {

double Adaptation::rank() const {
  const auto first = static_cast<double>(options_.rank);
  if ((!options_.adapt_rank && !options_.adapt_sync_every) || effective_.empty()) return first;
  if (options_.rank_rule) {
    const double rank = options_.rank_rule(effective_);
    if (!(rank >= 1 && rank <= first)) {
      throw ValueError("DiLoCoX: rank_rule: expected a number in [1, " + std::to_string(options_.rank) + "], got " +
                       std::to_string(rank));
    }
    return rank;
  }
  const auto window = static_cast<size_t>(options_.window);
  if (effective_.size() < window) return first;
  const double sum = std::accumulate(effective_.end() - options_.window, effective_.end(), 0.0);
  return std::clamp(sum / static_cast<double>(window), static_cast<double>(options_.min_rank), first);
}

int64_t Adaptation::syncEvery(double rank) const {
  if (!options_.adapt_sync_every) return options_.sync_every;
  const int64_t steps =
      options_.sync_rule
          ? options_.sync_rule(rank)
          : static_cast<int64_t>(std::llround(static_cast<double>(options_.sync_every) * rank / options_.rank));
  if (options_.sync_rule && (steps < options_.fragments || steps > options_.sync_every)) {
    throw ValueError("DiLoCoX: sync_rule: expected a number in " + std::to_string(options_.fragments) + "..." +
                     std::to_string(options_.sync_every) + ", got " + std::to_string(steps));
  }
  return std::max(steps, options_.min_sync_every);
}

}  // namespace lowcomm
