// all_gather of W ranks, n bytes of a rank's encoded part.
//
// Direct:
//   1. Every rank encodes its part once, frame by frame, and sends each frame to all others: (W - 1)·n bytes out.
//   2. Every rank decodes the frames of all parts as they come, (W - 1)·n bytes in, and its own frames too.
//
// Around a ring, from GroupContext::ring_from ranks on; W - 1 steps:
//   Step 0: every rank sends its encoded part to the next rank, n bytes out and n in, and decodes it too.
//   Step s: it sends the next rank the codes that came in step s - 1, unchanged: n bytes out, n in. Frame k of a step
//   leaves once frame k of the step before has come.
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

// The codes of one part on their way around the ring, by frame.
using RingCodes = std::vector<std::vector<std::byte>>;

// Step s: the part of rank - s goes to the next rank, that of rank - s - 1 comes from the rank before.
class RingStep final : public Phase {
 public:
  RingStep(const OpContext& op, GatheredTensor& tensor, RingCodes& codes, int step)
      : tensor_(tensor),
        codes_(codes),
        rank_(op.rank()),
        before_((op.rank() - 1 + op.size()) % op.size()),
        owner_((op.rank() - step - 1 + op.size()) % op.size()),
        first_(step == 0),
        last_(step == op.size() - 2) {
    const int next = (rank_ + 1) % op.size(), sent = (owner_ + 1) % op.size();
    out = onlyFor(next, op.size(), &tensor.plans().of(sent));
    in = onlyFor(before_, op.size(), &tensor.plans().of(owner_));
  }

  size_t readyAfter(size_t k) const override { return first_ ? 0 : k + 1; }

  void start(size_t k) override {
    if (first_) tensor_.start(k);
  }

  void encode(size_t k, int /*peer*/, std::span<std::byte> payload) override {
    if (!first_) {
      std::memcpy(payload.data(), codes_[k].data(), payload.size());
      return;
    }
    tensor_.encode(k, payload);
    tensor_.take(rank_, k, payload, rank_);
  }

  void absorb(size_t k, const Payloads& payloads) override {
    const auto payload = payloads[before_];
    if (payload.empty()) return;
    tensor_.take(owner_, k, payload, before_);
    if (last_) return;
    if (codes_.size() <= k) codes_.resize(k + 1);
    codes_[k].assign(payload.begin(), payload.end());
  }

 private:
  GatheredTensor& tensor_;
  RingCodes& codes_;
  const int rank_, before_, owner_;  // owner_: of the part that comes
  const bool first_, last_;
};

// The bytes that this rank would send without a codec: its own part to every other; around a ring all parts but the
// next rank's.
uint64_t rawBytes(const OpContext& op, const RankPlans& plans, bool ring) {
  if (!ring) return plans.of(op.rank()).rawBytes() * (op.size() - 1);
  return plans.rawBytesToPeers((op.rank() + 1) % op.size());
}

}  // namespace

void allGather(OpContext& op, const std::vector<GatherMessage>& messages) {
  const int size = op.size(), ring_from = op.group.ring_from;
  const bool ring = ring_from > 0 && size > 2 && size >= ring_from;
  std::deque<GatheredTensor> tensors;
  std::deque<SendPart> parts;
  std::deque<RingStep> steps;
  std::deque<RingCodes> codes;
  std::vector<MessageSummary> summaries;
  Exchange exchange;
  for (const GatherMessage& message : messages) {
    GatheredTensor& tensor = tensors.emplace_back(op, message);
    summaries.push_back(tensor.summary());
    op.counters.raw_bytes += rawBytes(op, tensor.plans(), ring);
    if (!ring) {
      exchange.phases.push_back(&parts.emplace_back(op, tensor));
      continue;
    }
    RingCodes& passing = codes.emplace_back();
    for (int step = 0; step < size - 1; ++step)
      exchange.phases.push_back(&steps.emplace_back(op, tensor, passing, step));
  }
  exchange.description = describe(op.op, summaries);
  runExchange(op, exchange);
  for (GatheredTensor& tensor : tensors)
    tensor.wait();
}

}  // namespace lowcomm
