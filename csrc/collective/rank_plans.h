#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collective/message_summary.h"
#include "collective/plan.h"

namespace lowcomm {

// How one tensor's parts, a rank each, are cut into frames: once where all parts are alike.
class RankPlans {
 public:
  // `layouts`: one for all ranks, or one a rank; ValueError for another number. Throws as planMessage.
  RankPlans(const std::vector<Layout>& layouts, DType dtype, size_t chunk_bytes, int ranks);

  const MessagePlan& of(int rank) const { return plans_[plans_.size() == 1 ? 0 : rank]; }

  // By rank: what Phase::out and Phase::in hold.
  std::vector<const MessagePlan*> all() const;

  // What the parts of all ranks but `rank` take as elements: what it would send uncoded.
  uint64_t rawBytesToPeers(int rank) const;

  // Elements of a rank's part, or the parts' joined by "/" where they differ.
  MessageSummary described() const;

 private:
  int ranks_;
  std::vector<MessagePlan> plans_;
};

}  // namespace lowcomm
