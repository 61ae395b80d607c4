// all_gather of W ranks, n bytes of a rank's encoded part.
//   1. Every rank encodes its part once, frame by frame, and sends each frame to all others: (W - 1)·n bytes out.
//   2. Every rank decodes the frames of all parts as they come, (W - 1)·n bytes in, and its own frames too.
#include "collective/collectives.h"

#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <span>

#include "collective/context.h"
#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "collective/plan.h"
#include "collective/source_sink.h"

namespace lowcomm {
namespace {

// One tensor: this rank's part to all others, theirs to this rank.
class GatheredTensor final : public Phase {
 public:
  GatheredTensor(OpContext& op, const GatherMessage& message)
      : op_(op),
        message_(message),
        plans_(message.layouts, message.dtype, op.chunkBytes(), op.size()),
        source_(makeSource(op, message.device_codec,
                           {own(), message.input, message.draws, {}, /*decoded=*/message.outputs[op.rank()]})) {
    for (int rank = 0; rank < op.size(); ++rank) {
      const void* sent = rank == op.rank() ? message.input : nullptr;
      sinks_.push_back(makeSink(op, message.device_codec, {plans_.of(rank), message.outputs[rank], sent}));
    }
    out.assign(op.size(), &own());
    in = plans_.all();
    same_to_all = true;
  }

  const MessagePlan& own() const { return plans_.of(op_.rank()); }
  MessageSummary summary() const { return plans_.described().as(message_.type_name, message_.type_elements); }

  void start(size_t k) override {
    if (k < own().frames.size()) source_->start(k);
  }
  void encode(size_t k, int /*peer*/, std::span<std::byte> payload) override { source_->encode(k, payload); }
  void absorb(size_t k, const Payloads& payloads) override {
    for (int rank = 0; rank < op_.size(); ++rank) {
      const bool there = message_.device_codec && rank == op_.rank();  // the source has decoded a device's own elements
      if (!there && !payloads[rank].empty()) sinks_[rank]->take(k, payloads[rank], rank);
    }
  }
  void wait() {
    for (const auto& sink : sinks_)
      sink->wait();
  }

 private:
  OpContext& op_;
  const GatherMessage& message_;
  const RankPlans plans_;  // how the parts are cut
  const std::unique_ptr<Source> source_;
  std::vector<std::unique_ptr<Sink>> sinks_;  // by rank
};

}  // namespace

void allGather(OpContext& op, const std::vector<GatherMessage>& messages) {
  std::deque<GatheredTensor> tensors;
  std::vector<MessageSummary> summaries;
  Exchange exchange;
  for (const GatherMessage& message : messages) {
    GatheredTensor& tensor = tensors.emplace_back(op, message);
    summaries.push_back(tensor.summary());
    op.counters.raw_bytes += tensor.own().rawBytes() * (op.size() - 1);
    exchange.phases.push_back(&tensor);
  }
  exchange.description = describe(op.op, summaries);
  runExchange(op, exchange);
  for (GatheredTensor& tensor : tensors)
    tensor.wait();
}

}  // namespace lowcomm
