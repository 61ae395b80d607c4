// What the shards or stages of one model agree on: at every outer step, and when a checkpoint is written.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"
#include "collective/agree.h"
#include "collective/context.h"
#include "optim/diloco.h"
#include "optim/gathered.h"

namespace lowcomm {
namespace {

// What a stage without an average gives in place of its rank, by what it threw; why is agreed on after that.
constexpr double kSpoilt = std::numeric_limits<double>::quiet_NaN();  // ValueError
constexpr double kLost = std::numeric_limits<double>::infinity();     // PeerError: a peer or the network

std::string textOf(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  } catch (...) {
    return "an unknown error";
  }
}

bool isLost(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerError&) {
    return true;
  } catch (...) {
    return false;
  }
}

// Compares a field, or tells an error in its place. Throws PeerRefused where any rank has an error, this one too.
void tell(OpQueue& queue, const std::string& op, const std::string& error, int64_t step) {
  KeyValues hello;
  hello.fields = {error.empty() ? std::pair<std::string, std::string>("inner step", std::to_string(step))
                                : std::pair<std::string, std::string>("error", error.substr(0, kMaxErrorText))};
  Ticket(queue, op, 1, [&](OpContext& context) { agree(context, hello); }).wait();
}

constexpr const char* kStep = "DiLoCoX outer step";
constexpr const char* kState = "DiLoCoX state";

}  // namespace

bool DiLoCoX::agreesInCluster() const {
  return cluster_ && options_.adapt_sync_every;
}

// The others of the model wait for this rank's word on sync_every: where there is none, for what it is about to throw.
void DiLoCoX::tellCluster(const std::exception_ptr& error) {
  if (!agreesInCluster()) return;
  try {
    gathered(isLost(error) ? kLost : kSpoilt, *cluster_, kStep);
    tell(*cluster_, kStep, textOf(error), steps_);
  } catch (...) {
    // The caller throws its own.
  }
}

// The mean of every stage's rank, the same on all: added in rank order.
double DiLoCoX::rankInCluster() {
  const std::vector<double> all = gathered(rank_, *cluster_, kStep);
  double sum = 0;
  for (double one : all)
    sum += one;
  if (std::isfinite(sum)) return sum / static_cast<double>(all.size());
  try {
    tell(*cluster_, kStep, "", steps_);
  } catch (const PeerRefused& told) {
    const std::string what =
        std::string(
            "DiLoCoX: expected an average of every shard and stage of the model, got an error of another "
            "one's; the outer step was dropped here, too: ") +
        told.what();
    if (std::any_of(all.begin(), all.end(), [](double one) { return std::isinf(one); })) throw PeerError(what);
    throw ValueError(what);
  }
  throw ValueError("DiLoCoX: expected the reason of another stage's error, got none");
}

// An outer step that no average came with: the others of the model may have one, as after an error of this stage alone,
// and wait for its word. So every outer step has one.
void DiLoCoX::agreeWithout(const FragmentSchedule& s) {
  if (agreesInCluster() && !s.buffers) adapt();
}

void DiLoCoX::adapt() {
  // Shards and stages see other averages: without one interval for all of them a stage would wait for ever.
  const double agreed = agreesInCluster() ? rankInCluster() : rank_;
  sync_every_ = adaptation_.syncEvery(agreed);
  if (!options_.adapt_rank) return;
  for (size_t f = 0; f < of_parameters_; ++f)
    fragments_[f].fragment.setRank(std::llround(rank_));
}

// First among those that average with this rank, then among the parts of its model: so everybody hears of it.
void DiLoCoX::agreeOnState(std::string error) {
  if (!cluster_) return;
  std::exception_ptr told;
  for (const std::shared_ptr<OpQueue>& queue : {group_, cluster_}) {
    if (!queue) continue;
    try {
      tell(*queue, kState, error, steps_);
    } catch (const std::exception& caught) {
      if (!error.empty()) continue;
      error = caught.what();
      told = std::current_exception();
    }
  }
  if (told) std::rethrow_exception(told);
}

void DiLoCoX::stateFailed(const std::string& error) {
  agreeOnState(error.empty() ? "no reason was given" : error);
}

TensorMap DiLoCoX::state() {
  try {
    for (FragmentSchedule& s : fragments_)
      s.fragment.wait();
  } catch (...) {
    giveUp();
    agreeOnState(textOf(std::current_exception()));
    throw;
  }
  agreeOnState("");
  TensorMap state = counters();
  for (const FragmentSchedule& s : fragments_)
    state.merge(s.fragment.state());
  return state;
}

}  // namespace lowcomm
