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

// One tensor: how the parts are cut, where this rank's is encoded from, and where all are decoded to.
class GatheredTensor {
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
  }

  const RankPlans& plans() const { return plans_; }
  const MessagePlan& own() const { return plans_.of(op_.rank()); }
  MessageSummary summary() const { return plans_.described().as(message_.type_name, message_.type_elements); }

  // Starts sending frame k of this rank's part.
  void start(size_t k) {
    if (k < own().frames.size()) source_->start(k);
  }
  void encode(size_t k, std::span<std::byte> payload) { source_->encode(k, payload); }

  // Frame k of the part of `owner`, as `sender` sent it. Of a device's elements the source has decoded its own.
  void take(int owner, size_t k, std::span<const std::byte> payload, int sender) {
    if (!message_.device_codec || owner != op_.rank()) sinks_[owner]->take(k, payload, sender);
  }

  void wait() {
    for (const auto& sink : sinks_)
      sink->wait();
  }

 private:
  OpContext& op_;
  const GatherMessage& message_;
  const RankPlans plans_;
  const std::unique_ptr<Source> source_;
  std::vector<std::unique_ptr<Sink>> sinks_;  // by rank
};

// This rank's part to all others, theirs to this rank.
class SendPart final : public Phase {
 public:
  SendPart(const OpContext& op, GatheredTensor& tensor) : tensor_(tensor) {
    out.assign(op.size(), &tensor.own());
    in = tensor.plans().all();
    same_to_all = true;
  }

  void start(size_t k) override { tensor_.start(k); }
  void encode(size_t k, int /*peer*/, std::span<std::byte> payload) override { tensor_.encode(k, payload); }
  void absorb(size_t k, const Payloads& payloads) override {
    for (size_t rank = 0; rank < payloads.size(); ++rank) {
      const int owner = static_cast<int>(rank);
      if (!payloads[rank].empty()) tensor_.take(owner, k, payloads[rank], owner);
    }
  }

 private:
  GatheredTensor& tensor_;
};

}  // namespace

void allGather(OpContext& op, const std::vector<GatherMessage>& messages) {
  std::deque<GatheredTensor> tensors;
  std::deque<SendPart> parts;
  std::vector<MessageSummary> summaries;
  Exchange exchange;
  for (const GatherMessage& message : messages) {
    GatheredTensor& tensor = tensors.emplace_back(op, message);
    summaries.push_back(tensor.summary());
    op.counters.raw_bytes += tensor.plans().of(op.rank()).rawBytes() * (op.size() - 1);
    exchange.phases.push_back(&parts.emplace_back(op, tensor));
  }
  exchange.description = describe(op.op, summaries);
  runExchange(op, exchange);
  for (GatheredTensor& tensor : tensors)
    tensor.wait();
}

}  // namespace lowcomm
