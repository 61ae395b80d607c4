// The agreements of an outer loop with other ranks, in addition to the average: with the shards or stages of its model
// at every outer step and when a checkpoint is written; with another group, which rank is ahead and what the others
// take from it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"
#include "collective/collectives.h"
#include "collective/context.h"
#include "optim/diloco.h"

namespace lowcomm {
namespace {

// Every rank's number, by rank. Collective over the queue's group; `what` names the op. Throws as runExchange.
std::vector<double> gathered(double mine, OpQueue& queue, const std::string& what) {
  std::vector<double> all(queue.size());
  Ticket(queue, what, 1, [&](OpContext& op) {
    GatherMessage message{.layouts = {Layout::single(sizeof(double), CodecSpec{})}, .input = &mine};
    message.type_name = "float64";
    message.type_elements = "1";
    for (double& one : all)
      message.outputs.push_back(&one);
    allGather(op, {message});
  }).wait();
  return all;
}

// A stage without an average gives one of these in place of its rank; the reason is agreed on after that.
constexpr double kSpoilt = std::numeric_limits<double>::quiet_NaN();  // ValueError
constexpr double kLost = std::numeric_limits<double>::infinity();     // PeerError: a peer or the network

std::string reasonOf(const std::exception_ptr& error) {
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

// Compares a field, or tells an error in its place. Throws PeerRefusal where any rank has an error, this one too.
void tell(OpQueue& queue, const std::string& op, const std::string& error, int64_t step) {
  KeyValues description;
  description.fields = {error.empty() ? std::pair<std::string, std::string>("inner step", std::to_string(step))
                                      : std::pair<std::string, std::string>("error", error.substr(0, kMaxErrorText))};
  Ticket(queue, op, 1, [&](OpContext& context) { agree(context, description); }).wait();
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
    tell(*cluster_, kStep, reasonOf(error), steps_);
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
  } catch (const PeerRefusal& told) {
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

// ---- another group ----

void DiLoCoX::regroup(std::shared_ptr<OpQueue> group) {
  giveUp();
  group_ = std::move(group);
  agree("", /*values=*/false);
  const std::vector<double> applied = gathered(static_cast<double>(applied_), *group_, "compare outer steps");
  const std::vector<double> sums = gathered(static_cast<double>(checksum()), *group_, "compare outer parameters");
  const auto equal = [](const std::vector<double>& all) {
    return std::all_of(all.begin(), all.end(), [&](double one) { return one == all[0]; });
  };
  const auto root = std::max_element(applied.begin(), applied.end()) - applied.begin();
  if (applied[root] < 0) {
    throw ValueError(
        "DiLoCoX: regroup: expected a rank with a whole outer state, got only such as were lost while they took it "
        "over: load a checkpoint");
  }
  steps_ = static_cast<int64_t>(gathered(static_cast<double>(steps_), *group_, "compare inner steps")[root]);
  const auto mine = static_cast<size_t>(group_->rank());
  takeFrom(static_cast<int>(root), /*behind=*/applied[mine] != applied[root] || sums[mine] != sums[root],
           /*tensors=*/!equal(applied) || !equal(sums));
  for (size_t f = 0; f < fragments_.size(); ++f) {
    const int64_t place = f < of_parameters_ ? static_cast<int64_t>(f) : 0;  // buffers go with the first
    fragments_[f].send_at = steps_ + sync_every_ * (place + 1) / options_.fragments;
  }
  report_.participating = group_->size();
}

// Counters always; `tensors` where any rank needs them. One that is lost in the middle of that has no state: applied_
// says so until all has come.
void DiLoCoX::takeFrom(int root, bool behind, bool tensors) {
  std::vector<double> effective = adaptation_.effectiveRanks();
  const double known = static_cast<double>(effective.size());
  effective.resize(static_cast<size_t>(gathered(known, *group_, "compare effective ranks")[root]));
  std::vector<double> counters = {static_cast<double>(applied_), static_cast<double>(sync_every_), rank_,
                                  static_cast<double>(report_.outer_steps)};
  for (const FragmentSchedule& s : fragments_)
    counters.push_back(static_cast<double>(s.sent));
  effective.insert(effective.begin(), counters.begin(), counters.end());
  std::vector<BroadcastMessage> messages = {{effective.size(), CodecSpec{}, DType::float64, effective.data(), {}}};
  const auto copy = [&] {
    Ticket(*group_, "take over the outer state", 1, [&](OpContext& op) { broadcast(op, messages, root); }).wait();
    messages.clear();
  };
  copy();
  if (behind) applied_ = -1;
  sync_every_ = static_cast<int64_t>(effective[1]);
  rank_ = effective[2];
  report_.outer_steps = static_cast<int64_t>(effective[3]);
  for (size_t f = 0; f < fragments_.size(); ++f)
    fragments_[f].sent = static_cast<int64_t>(effective[4 + f]);
  adaptation_.set({effective.begin() + static_cast<std::ptrdiff_t>(counters.size()), effective.end()});
  for (FragmentSchedule& s : fragments_) {
    s.fragment.setRank(std::llround(rank_));
    if (!tensors) continue;
    for (at::Tensor& tensor : s.fragment.shared())
      messages.push_back(
          {static_cast<uint64_t>(tensor.numel()), CodecSpec{}, DType::float32, tensor.mutable_data_ptr<float>(), {}});
  }
  if (tensors) {
    copy();
    for (FragmentSchedule& s : fragments_)
      s.fragment.share(behind);
  }
  applied_ = static_cast<int64_t>(effective[0]);
}

}  // namespace lowcomm
