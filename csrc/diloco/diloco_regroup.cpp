// An outer loop goes on in other groups: which sites are ahead, and what the others take from them.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <utility>

#include "base/error.h"
#include "collective/collectives.h"
#include "diloco/diloco.h"
#include "tensor/gather_values.h"
#include "wire/layout.h"

namespace lowcomm {

// The ranks of a stripe after they have met: those with the most outer steps, which have the same θ̄, and the others.
struct DiLoCoX::Ahead {
  std::vector<int> ahead, behind;

  bool isBehind(int rank) const { return std::find(behind.begin(), behind.end(), rank) != behind.end(); }
};

// A fragment of a stripe on its way from the ranks that are ahead to those behind.
using Parcels = std::vector<at::Tensor>;  // in host memory of their own, by the rank that they come from
struct DiLoCoX::Handover {
  Fragment& fragment;
  std::vector<at::Tensor> tensors;
  std::vector<int> sources;  // of the tensors
  bool behind;
  std::shared_ptr<Parcels> parcels;  // of the op, too, which may end after the one who gives has gone on
  Ticket op;

  std::vector<int64_t> elements(int size) const {
    std::vector<int64_t> all(size, 0);
    for (size_t i = 0; i < tensors.size(); ++i)
      all[sources[i]] += tensors[i].numel();
    return all;
  }

  // Copies the tensors that come from a rank into its parcel (`out`), or from it.
  void copy(int from, bool out) const {
    int64_t at = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (sources[i] != from) continue;
      const at::Tensor place = (*parcels)[from].narrow(0, at, tensors[i].numel());
      at += tensors[i].numel();
      out ? place.copy_(tensors[i].view({-1})) : tensors[i].view({-1}).copy_(place);
    }
  }
};

void DiLoCoX::regroup(std::vector<std::shared_ptr<OpQueue>> stripes) {
  if (stripes.size() != model_->stripes().size()) {
    throw ValueError(c10::str("DiLoCoX: regroup: expected a group for each of the ", model_->stripes().size(),
                              " stripes of this rank, got ", stripes.size()));
  }
  giveUp();
  groups_ = std::move(stripes);
  // The site's training goes to the stripes first: spread() below is of all ranks or of none.
  for (FragmentSchedule& s : fragments_)
    s.model.collect(s.number);
  bool behind = false;
  std::vector<Handover> handovers;
  const std::vector<double> own_schedule = schedule(), own_ranks = adaptation_.effectiveRanks();
  report_.taken_bytes = 0;
  const auto start = Clock::now();
  auto taken_from = start;
  std::exception_ptr error;
  try {
    agree(/*values=*/false);
    std::vector<Ahead> ahead;
    for (size_t stripe = 0; stripe < groups_.size(); ++stripe) {
      ahead.push_back(mostAdvanced(stripe));
      behind = behind || ahead[stripe].isBehind(groups_[stripe]->rank());
    }
    for (size_t stripe = 0; stripe < groups_.size(); ++stripe)
      takeCounters(*groups_[stripe], ahead[stripe]);
    taken_from = Clock::now();  // from here on the sites that are ahead wait for no other one
    for (size_t stripe = 0; stripe < groups_.size(); ++stripe) {
      if (!ahead[stripe].behind.empty()) handOver(stripe, ahead[stripe], handovers);
    }
    for (Handover& one : handovers) {
      if (one.behind) awaitInSite(one.op);
    }
  } catch (...) {
    error = std::current_exception();
  }
  try {
    agreeOnAverage({}, error);
  } catch (...) {  // no rank of the site has written anything yet
    for (FragmentSchedule& s : fragments_)
      std::for_each(s.stripes.begin(), s.stripes.end(), [](Fragment& stripe) { stripe.unshare(); });
    setSchedule(own_schedule);
    step_s_ = own_schedule[5];  // where it was not known yet, too
    adaptation_.set(own_ranks);
    setRanks();
    throw;
  }
  for (Handover& one : handovers)
    take(one);
  report_.taken_s = secondsSince(start);
  double late_s = secondsSince(taken_from);
  behind = agreeOnSchedule(behind, late_s);
  startIntervals();
  if (behind) {
    for (FragmentSchedule& s : fragments_) {
      s.model.spread(s.number);
      s.samples = 0;  // nothing is trained since
    }
    leaveOut(late_s);
  }
  step_ended_ = {};
  formed_ = true;
  if (!groups_.empty()) report_.participating = groups_[0]->size();
}

// A rank that carries no stripe takes its site's schedule, and the effective ranks of its part of the model. Returns
// whether any rank of the site was behind; `late_s` becomes the first rank's.
bool DiLoCoX::agreeOnSchedule(bool behind, double& late_s) {
  if (!site_.ranks) return behind;
  std::vector<double> effective = adaptation_.effectiveRanks();
  std::vector<double> mine = schedule();
  const size_t numbers = mine.size();
  mine.insert(mine.end(), {static_cast<double>(effective.size()), groups_.empty() ? 0. : 1., late_s, behind ? 1. : 0.});
  double step_s = 0;
  size_t most = 0;
  const auto all = gatherNumbers(mine, *site_.ranks, "DiLoCoX: compare the schedule in a site");
  for (const std::vector<double>& one : all) {
    behind = behind || one.back() == 1;
    most = std::max(most, static_cast<size_t>(one[numbers]));
    step_s = std::max(step_s, one[numbers - 1 - fragments_.size()]);
  }
  late_s = all[0][numbers + 2];
  effective.resize(most);
  std::vector<std::vector<double>> known(all.size());
  if (most > 0) known = gatherNumbers(effective, *site_.ranks, "DiLoCoX: compare effective ranks in a site");
  for (size_t rank = 0; rank < all.size() && groups_.empty(); ++rank) {
    if (all[rank][numbers + 1] != 1 || !model_->isOfPart(static_cast<int>(rank))) continue;
    setSchedule(all[rank]);
    known[rank].resize(static_cast<size_t>(all[rank][numbers]));
    adaptation_.set(known[rank]);
  }
  step_s_ = step_s;
  return behind;
}

// Leaves out the inner steps that the others have made meanwhile, but for the one before the next pseudo-gradient: so
// they need not wait until this site has made them all.
void DiLoCoX::leaveOut(double late_s) {
  int64_t next = fragments_.front().send_at;
  for (FragmentSchedule& s : fragments_) {
    next = std::min(next, s.send_at);
    s.due -= ofSeconds(late_s);
  }
  const double made = step_s_ > 0 ? late_s / step_s_ : 0;
  steps_ += static_cast<int64_t>(std::min(made, std::max(0., static_cast<double>(next - 1 - steps_))));
}

DiLoCoX::Ahead DiLoCoX::mostAdvanced(size_t stripe) const {
  OpQueue& group = *groups_[stripe];
  const auto applied = gatherNumber(static_cast<double>(applied_), group, "DiLoCoX: compare outer steps");
  const auto sums = gatherNumber(static_cast<double>(checksum(stripe)), group, "DiLoCoX: compare outer parameters");
  const auto first = std::max_element(applied.begin(), applied.end()) - applied.begin();
  Ahead found;
  for (int rank = 0; rank < group.size(); ++rank) {
    const bool equal = applied[rank] == applied[first] && sums[rank] == sums[first];
    (equal ? found.ahead : found.behind).push_back(rank);
  }
  return found;
}

std::vector<double> DiLoCoX::schedule() const {
  std::vector<double> numbers = {static_cast<double>(steps_),
                                 static_cast<double>(applied_),
                                 static_cast<double>(sync_every_),
                                 rank_,
                                 static_cast<double>(report_.outer_steps),
                                 step_s_};
  for (const FragmentSchedule& s : fragments_)
    numbers.push_back(static_cast<double>(s.sent));
  return numbers;
}

void DiLoCoX::setSchedule(const std::vector<double>& numbers) {
  steps_ = static_cast<int64_t>(numbers[0]);
  applied_ = static_cast<int64_t>(numbers[1]);
  sync_every_ = static_cast<int64_t>(numbers[2]);
  rank_ = numbers[3];
  report_.outer_steps = static_cast<int64_t>(numbers[4]);
  if (numbers[5] > 0) step_s_ = numbers[5];
  for (size_t f = 0; f < fragments_.size(); ++f)
    fragments_[f].sent = static_cast<int64_t>(numbers[6 + f]);
}

// All ranks of the stripe take the first advanced one's, which the others that are ahead have already.
void DiLoCoX::takeCounters(OpQueue& group, const Ahead& ahead) {
  const int root = ahead.ahead[0];
  setSchedule(gatherNumbers(schedule(), group, "DiLoCoX: compare the schedule")[root]);
  std::vector<double> effective = adaptation_.effectiveRanks();
  const auto known = gatherNumber(static_cast<double>(effective.size()), group, "DiLoCoX: compare effective ranks");
  effective.resize(static_cast<size_t>(known[root]));
  if (!effective.empty()) {
    std::vector<BroadcastMessage> messages = {{effective.size(), CodecSpec{}, DType::float64, effective.data(), {}}};
    Ticket(group, "DiLoCoX: take over effective ranks", 1, [&](OpContext& op) {
      broadcast(op, messages, root);
    }).wait();
  }
  adaptation_.set(std::move(effective));
  setRanks();
}

// Fragment by fragment, each tensor from another of the ranks that are ahead, in turn, to all that are behind, who
// take() it when all of it has come. A rank that gives goes on at once: its next op of the group comes after these, and
// an error of one of these ends the group.
void DiLoCoX::handOver(size_t stripe, const Ahead& ahead, std::vector<Handover>& handovers) {
  OpQueue& group = *groups_[stripe];
  const int rank = group.rank(), size = group.size();
  const bool behind = ahead.isBehind(rank);
  for (FragmentSchedule& s : fragments_) {
    Handover handover{s.stripes[stripe], s.stripes[stripe].shared(), {}, behind, std::make_shared<Parcels>(size), {}};
    for (size_t i = 0; i < handover.tensors.size(); ++i)
      handover.sources.push_back(ahead.ahead[i % ahead.ahead.size()]);
    const std::vector<int64_t> elements = handover.elements(size);
    std::vector<at::Tensor>& parcels = *handover.parcels;
    AllToAllMessage message;
    for (int other = 0; other < size; ++other) {
      const bool sends = !behind && ahead.isBehind(other), receives = behind && elements[other] > 0;
      if (receives) parcels[other] = at::empty({elements[other]}, at::kFloat);
      if (sends && !parcels[rank].defined()) {
        parcels[rank] = at::empty({elements[rank]}, at::kFloat);
        handover.copy(rank, /*out=*/true);
      }
      message.sent.push_back(Layout::single(sends ? elements[rank] : 0, CodecSpec{}));
      message.got.push_back(Layout::single(receives ? elements[other] : 0, CodecSpec{}));
      message.inputs.push_back(sends ? parcels[rank].const_data_ptr() : nullptr);
      message.outputs.push_back(receives ? parcels[other].mutable_data_ptr() : nullptr);
    }
    handover.op = Ticket(group, "DiLoCoX: take over the outer state", 1,
                         [message, kept = handover.parcels](OpContext& op) { allToAll(op, message); });
    handovers.push_back(std::move(handover));
  }
}

void DiLoCoX::take(Handover& handover) {
  for (size_t from = 0; handover.behind && from < handover.parcels->size(); ++from) {
    const at::Tensor& parcel = (*handover.parcels)[from];
    if (!parcel.defined()) continue;
    handover.copy(static_cast<int>(from), /*out=*/false);
    report_.taken_bytes += parcel.nbytes();
  }
  handover.fragment.share(handover.behind);
}

}  // namespace lowcomm
