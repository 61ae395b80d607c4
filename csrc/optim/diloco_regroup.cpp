// The same loop in another group: who is ahead, and what the others take from it.
#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "collective/rooted.h"
#include "optim/diloco.h"
#include "optim/gathered.h"

namespace lowcomm {

void DiLoCoX::regroup(std::shared_ptr<OpQueue> group) {
  giveUp();
  group_ = std::move(group);
  agree("", /*values=*/false);
  const std::vector<double> applied = gathered(static_cast<double>(applied_), *group_, "compare outer steps");
  const std::vector<double> sums = gathered(static_cast<double>(checksum()), *group_, "compare outer parameters");
  const auto alike = [](const std::vector<double>& all) {
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
           /*tensors=*/!alike(applied) || !alike(sums));
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
