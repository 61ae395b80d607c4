#include "collective/reduce_scatter.h"

#include <cstddef>
#include <deque>
#include <iterator>
#include <span>

#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "collective/phase.h"
#include "collective/plan.h"
#include "collective/rank_order_sum.h"
#include "collective/reduce_tensors.h"

namespace lowcomm {
namespace {

// One tensor: what to send, and the accumulation of what comes.
class Scattering final : public Phase {
 public:
  Scattering(OpContext& op, const ScatterMessage& message, const Reduction& reduction)
      : op_(op),
        message_(message),
        reduction_(reduction),
        slices_(message.layouts, message.dtype, op.group.chunk_bytes, op.group.size()),
        contributions_(op, slices_, message.dtype, message.inputs, reduction, message.draws) {
    out = slices_.all();
    in.assign(op.size(), &slices_.of(op.rank()));
  }

  MessageSummary described() const { return slices_.described(); }

  uint64_t rawBytes() const { return slices_.rawBytesToPeers(op_.group.rank()); }

  void add(Exchange& exchange) { exchange.phases.push_back(this); }

  void check(size_t k) override { contributions_.checkOwn(k); }
  void encode(size_t k, int peer, std::span<std::byte> payload) override { contributions_.encode(k, peer, payload); }
  void absorb(size_t k, const Payloads& payloads) override {
    contributions_.whole(k, payloads, [this](const Run& run, const auto& whole) { reduce(run, whole); });
  }

 private:
  void reduce(const Run& run, const std::vector<std::span<const std::byte>>& payloads) {
    std::byte* out = static_cast<std::byte*>(message_.output) + run.at * itemBytes(message_.dtype);
    sumInRankOrder(op_, contributions_, run, payloads, out, message_.dtype, reduction_);
  }

  OpContext& op_;
  const ScatterMessage& message_;
  const Reduction& reduction_;
  const RankPlans slices_;
  Contributions contributions_;
};

}  // namespace

void reduceScatter(OpContext& op, const std::vector<ScatterMessage>& messages, const Reduction& reduction) {
  reduceTensors<Scattering>(op, messages, reduction);
}

}  // namespace lowcomm
