// What the shards or stages of one model agree on at every outer step.
#include <cmath>
#include <limits>

#include "codec/error.h"
#include "optim/diloco.h"
#include "optim/gathered.h"

namespace lowcomm {
namespace {

// The mean of every rank's number, the same everywhere: added in rank order.
double meanOf(double mine, OpQueue& queue) {
  double sum = 0;
  for (double one : gathered(mine, queue, "agree on sync_every"))
    sum += one;
  return sum / queue.size();
}

}  // namespace

bool DiLoCoX::agreesInCluster() const {
  return cluster_ && options_.adapt_sync_every;
}

// The others of the model wait for this rank's word on sync_every: NaN where there is none.
void DiLoCoX::tellCluster() {
  if (!agreesInCluster()) return;
  try {
    meanOf(std::numeric_limits<double>::quiet_NaN(), *cluster_);
  } catch (...) {
    // The caller throws its own error.
  }
}

// An outer step that no average came with: the others of the model may have one, as after an error of this stage alone,
// and wait for its word. So every outer step has one.
void DiLoCoX::agreeWithout(const Scheduled& s) {
  if (agreesInCluster() && !s.buffers) adapt();
}

void DiLoCoX::adapt() {
  // Shards and stages see other averages: without one interval for all of them a stage would wait for ever.
  const double agreed = agreesInCluster() ? meanOf(rank_, *cluster_) : rank_;
  if (std::isnan(agreed)) {
    throw ValueError(
        "DiLoCoX: expected an average of every shard and stage of the model, got an error of another one's; the outer "
        "step was dropped here, too");
  }
  sync_every_ = adaptation_.syncEvery(agreed);
  if (!options_.adapt_rank) return;
  for (size_t f = 0; f < of_parameters_; ++f)
    fragments_[f].fragment.setRank(std::llround(rank_));
}

}  // namespace lowcomm
