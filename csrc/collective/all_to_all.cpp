// all_to_all of W ranks:
//   1. Every rank encodes its part for each other rank and sends it there: the bytes of W - 1 encoded parts out.
//   2. It decodes the part that each of them sends: the bytes of W - 1 encoded parts in.
//   3. The part that it keeps it copies: no bytes.
#include "collective/collectives.h"

#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <span>

#include "base/error.h"
#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "collective/op_context.h"
#include "collective/plan.h"
#include "collective/source_sink.h"
#include "collective/staged.h"

namespace lowcomm {
namespace {

// The part that a rank keeps: its own codec, or null where it has no elements.
class KeptPart {
 public:
  KeptPart(const OpContext& op, const AllToAllMessage& message)
      : message_(message), rank_(op.rank()), elements_(message.sent[rank_].elements()) {
    if (elements_ != message.got[rank_].elements()) {
      throw ValueError("all_to_all: what rank " + std::to_string(rank_) +
                       " keeps: expected as many elements in as out, " + std::to_string(elements_) + ", got " +
                       std::to_string(message.got[rank_].elements()));
    }
    if (elements_ > 0) codec_ = makeCodec(message.sent[rank_].segments()[0].codec);
  }

  // Checks elements on a device; `plan` has their frames.
  void checkStaged(DeviceCodec& device_codec, const MessagePlan& plan) {
    check_.emplace(device_codec, plan, message_.inputs[rank_], kKept);
  }

  void start(size_t k) {
    if (check_) check_->start(k);
  }

  // Its codec does not see it otherwise: a NaN must be told as if it were encoded.
  void check(size_t k) {
    if (check_) {
      check_->finish(k);
    } else if (k == 0 && codec_) {
      codec_->expectTaken(message_.inputs[rank_], message_.dtype, 0, elements_, kKept);
    }
  }

  void copy() const {
    if (!codec_) return;
    void* out = message_.outputs[rank_];
    const size_t bytes = elements_ * itemBytes(message_.dtype);
    if (message_.device_codec) return message_.device_codec->kernels().copy(out, message_.inputs[rank_], bytes);
    std::memcpy(out, message_.inputs[rank_], bytes);
  }

 private:
  static constexpr const char* kKept = "that it keeps";

  const AllToAllMessage& message_;
  const int rank_;
  const uint64_t elements_;
  std::shared_ptr<const Codec> codec_;
  std::optional<StagedCheck> check_;
};

// A part to each other rank, and one from each.
class SendParts final : public Phase {
 public:
  SendParts(OpContext& op, const AllToAllMessage& message, KeptPart& kept)
      : kept_(kept),
        sent_(message.sent, message.dtype, op.chunkBytes(), op.size()),
        got_(message.got, message.dtype, op.chunkBytes(), op.size()),
        sources_(op.size()),
        sinks_(op.size()) {
    for (int rank = 0; rank < op.size(); ++rank) {
      if (rank == op.rank()) continue;
      const Draws draws = message.draws.slot(static_cast<uint64_t>(rank));
      sources_[rank] = makeSource(op, message.device_codec,
                                  {sent_.of(rank), message.inputs[rank], draws, "for rank " + std::to_string(rank)});
      sinks_[rank] = makeSink(op, message.device_codec, {got_.of(rank), message.outputs[rank]});
    }
    out = sent_.all();
    in = got_.all();
    if (message.device_codec) kept.checkStaged(*message.device_codec, sent_.of(op.rank()));
  }

  const RankPlans& sent() const { return sent_; }

  void start(size_t k) override {
    kept_.start(k);
    for (size_t rank = 0; rank < sources_.size(); ++rank) {
      if (sources_[rank] && k < out[rank]->frames.size()) sources_[rank]->start(k);
    }
  }
  void check(size_t k) override { kept_.check(k); }
  void encode(size_t k, int peer, std::span<std::byte> payload) override { sources_[peer]->encode(k, payload); }
  void absorb(size_t k, const Payloads& payloads) override {
    for (size_t rank = 0; rank < payloads.size(); ++rank) {
      if (!payloads[rank].empty()) sinks_[rank]->take(k, payloads[rank], static_cast<int>(rank));
    }
  }
  void wait() {
    for (const auto& sink : sinks_) {
      if (sink) sink->wait();
    }
  }

 private:
  KeptPart& kept_;
  const RankPlans sent_, got_;
  std::vector<std::unique_ptr<Source>> sources_;  // by rank; null for this one
  std::vector<std::unique_ptr<Sink>> sinks_;      // likewise
};

std::string textOf(const Layout& part, int from) {
  const std::string codec = part.segments().empty() ? "none" : part.segments()[0].codec.str();
  return std::to_string(part.elements()) + " by " + codec + " from rank " + std::to_string(from);
}

// "10 by minmax8:bucket=1024 from rank 0, 20 by none from rank 1": the same on both.
std::string pairText(int a, const Layout& from_a, int b, const Layout& from_b) {
  return a < b ? textOf(from_a, a) + ", " + textOf(from_b, b) : textOf(from_b, b) + ", " + textOf(from_a, a);
}

}  // namespace

void allToAll(OpContext& op, const AllToAllMessage& message) {
  const int own = op.rank();
  KeptPart kept(op, message);
  SendParts parts(op, message, kept);
  op.counters.raw_bytes += parts.sent().rawBytesToPeers(own);

  MessageSummary summary = MessageSummary(parts.sent().of(own)).as(message.type_name, "by pair");
  summary.codec = "by pair";
  Exchange exchange;
  exchange.description = describe(op.op, {summary});
  for (int peer = 0; peer < op.size(); ++peer)
    exchange.pair_fields.emplace_back("parts", pairText(own, message.sent[peer], peer, message.got[peer]));
  exchange.phases = {&parts};
  runExchange(op, exchange);
  parts.wait();
  kept.copy();
}

}  // namespace lowcomm
