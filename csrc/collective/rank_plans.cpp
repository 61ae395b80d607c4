#include "collective/rank_plans.h"

#include <algorithm>

#include "base/error.h"

namespace lowcomm {

RankPlans::RankPlans(const std::vector<Layout>& layouts, DType dtype, size_t chunk_bytes, int ranks) : ranks_(ranks) {
  if (layouts.size() != 1 && layouts.size() != static_cast<size_t>(ranks)) {
    throw ValueError("layouts of the ranks' parts: expected 1 or " + std::to_string(ranks) + ", got " +
                     std::to_string(layouts.size()));
  }
  const auto same = [&](const Layout& layout) { return layout.segments() == layouts.front().segments(); };
  const bool alike = std::all_of(layouts.begin(), layouts.end(), same);
  for (const Layout& layout : layouts) {
    if (plans_.empty() || !alike) plans_.push_back(planMessage(layout, dtype, chunk_bytes));
  }
}

std::vector<const MessagePlan*> RankPlans::all() const {
  std::vector<const MessagePlan*> plans;
  for (int rank = 0; rank < ranks_; ++rank)
    plans.push_back(&of(rank));
  return plans;
}

uint64_t RankPlans::rawBytesToPeers(int rank) const {
  uint64_t bytes = 0;
  for (int peer = 0; peer < ranks_; ++peer)
    bytes += peer == rank ? 0 : of(peer).rawBytes();
  return bytes;
}

MessageSummary RankPlans::described() const {
  MessageSummary described(plans_.front());
  for (size_t rank = 1; rank < plans_.size(); ++rank) {
    const MessageSummary other(plans_[rank]);
    described.elements += "/" + other.elements;
    if (described.codec == "none") described.codec = other.codec;  // of parts without elements
  }
  return described;
}

}  // namespace lowcomm
