#include "diloco/handover.h"

#include <algorithm>

#include "collective/collectives.h"
#include "engine/op_queue.h"
#include "wire/layout.h"

namespace lowcomm {

bool StripeRanks::isBehind(int rank) const {
  return std::find(behind.begin(), behind.end(), rank) != behind.end();
}

StripeRanks StripeRanks::compare(OpQueue& group, int64_t applied, uint32_t checksum) {
  const auto steps = gatherNumber(static_cast<double>(applied), group, "DiLoCoX: compare outer steps");
  const auto sums = gatherNumber(static_cast<double>(checksum), group, "DiLoCoX: compare outer parameters");
  const auto first = std::max_element(steps.begin(), steps.end()) - steps.begin();
  StripeRanks found;
  for (int rank = 0; rank < group.size(); ++rank) {
    const bool equal = steps[rank] == steps[first] && sums[rank] == sums[first];
    (equal ? found.ahead : found.behind).push_back(rank);
  }
  return found;
}

void GroupHistory::leave() {
  constexpr size_t kKept = 64;
  const std::vector<uint32_t> left = std::exchange(epochs_, {});
  if (!std::exchange(taken_part_, false)) return;
  for (const uint32_t epoch : left)
    ended_.emplace_back(epoch, applied);
  if (ended_.size() > kKept) ended_.erase(ended_.begin(), ended_.end() - kKept);
  last_ = left;
}

void GroupHistory::join(const std::vector<std::shared_ptr<OpQueue>>& groups) {
  for (const std::shared_ptr<OpQueue>& group : groups)
    epochs_.push_back(group->group().epoch);
}

bool GroupHistory::isUncounted(size_t stripe, OpQueue& group, const StripeRanks& ranks) const {
  const auto asked = gatherNumber(last_.empty() ? 0 : last_[stripe], group, "DiLoCoX: compare last groups");
  std::vector<double> known(asked.size(), -1);
  for (const auto& [epoch, steps] : ended_) {
    for (size_t rank = 0; rank < asked.size(); ++rank)
      if (asked[rank] == epoch) known[rank] = static_cast<double>(steps);
  }
  const auto answers = gatherNumbers(known, group, "DiLoCoX: compare what last groups applied");
  return std::any_of(ranks.ahead.begin(), ranks.ahead.end(),
                     [&](int rank) { return answers[rank][group.rank()] == static_cast<double>(applied); });
}

Handover::Handover(OpQueue& group, const StripeRanks& ranks, Fragment& fragment)
    : fragment_(fragment),
      tensors_(fragment.shared()),
      takes_(ranks.isBehind(group.rank())),
      parcels_(std::make_shared<Parcels>(group.size())) {
  const int rank = group.rank(), size = group.size();
  for (size_t i = 0; i < tensors_.size(); ++i)
    sources_.push_back(ranks.ahead[i % ranks.ahead.size()]);
  const std::vector<int64_t> elements = this->elements(size);
  Parcels& parcels = *parcels_;
  AllToAllMessage message;
  for (int other = 0; other < size; ++other) {
    const bool sends = !takes_ && ranks.isBehind(other), receives = takes_ && elements[other] > 0;
    if (receives) parcels[other] = at::empty({elements[other]}, at::kFloat);
    if (sends && !parcels[rank].defined()) {
      parcels[rank] = at::empty({elements[rank]}, at::kFloat);
      copy(rank, /*out=*/true);
    }
    message.sent.push_back(Layout::single(sends ? elements[rank] : 0, CodecSpec{}));
    message.got.push_back(Layout::single(receives ? elements[other] : 0, CodecSpec{}));
    message.inputs.push_back(sends ? parcels[rank].const_data_ptr() : nullptr);
    message.outputs.push_back(receives ? parcels[other].mutable_data_ptr() : nullptr);
  }
  op_ = Ticket(group, "DiLoCoX: take over the outer state", 1,
               [message, kept = parcels_](OpContext& op) { allToAll(op, message); });
}

std::vector<int64_t> Handover::elements(int ranks) const {
  std::vector<int64_t> all(ranks, 0);
  for (size_t i = 0; i < tensors_.size(); ++i)
    all[sources_[i]] += tensors_[i].numel();
  return all;
}

// Copies the tensors that come from a rank into its parcel (`out`), or from it.
void Handover::copy(int from, bool out) const {
  int64_t at = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (sources_[i] != from) continue;
    const at::Tensor place = (*parcels_)[from].narrow(0, at, tensors_[i].numel());
    at += tensors_[i].numel();
    out ? place.copy_(tensors_[i].view({-1})) : tensors_[i].view({-1}).copy_(place);
  }
}

uint64_t Handover::finish(bool keeps) {
  uint64_t taken = 0;
  const std::vector<at::Tensor> trained = takes_ && keeps ? fragment_.pseudoGradients() : std::vector<at::Tensor>();
  for (size_t from = 0; takes_ && from < parcels_->size(); ++from) {
    const at::Tensor& parcel = (*parcels_)[from];
    if (!parcel.defined()) continue;
    copy(static_cast<int>(from), /*out=*/false);
    taken += parcel.nbytes();
  }
  fragment_.share(takes_, trained);
  return taken;
}

}  // namespace lowcomm
