#include "collective/all_reduce.h"

#include <cmath>
#include <cstddef>
#include <cstring>
#include <deque>
#include <span>

#include "codec/error.h"
#include "collective/describe.h"
#include "collective/exchange.h"
#include "collective/rank_plans.h"
#include "collective/slices.h"

namespace lowcomm {
namespace {

std::vector<Layout> layoutsOf(const std::vector<Slice>& slices, const CodecSpec& codec) {
  std::vector<Layout> layouts;
  for (const Slice& slice : slices)
    layouts.push_back(Layout::single(slice.count, codec));
  return layouts;
}

// One tensor: contributions to its slices, sums, and their codes.
class Reducing {
 public:
  Reducing(OpContext& op, const AllReduceMessage& message, const Reduction& reduction)
      : op_(op),
        message_(message),
        reduction_(reduction),
        slices_(slicesOf(message.elements, message.codec, op.group.size())),
        plans_(layoutsOf(slices_, message.codec), message.dtype, op.group.chunk_bytes, op.group.size()),
        contributions_(op, plans_, message.dtype, inputs(), reduction, message.draws, residuals()),
        own_(plans_.of(op.group.rank())) {
    if (message.codec.id == CodecId::none) {
      throw TypeError("all_reduce of codes: expected a codec that rounds its elements, got none");
    }
    if (reduction.kind != ReduceKind::sum) {
      throw ValueError(std::string("all_reduce of codes: expected a sum, got ") + reduceName(reduction.kind));
    }
    size_t bytes = 0;
    for (const Chunk& chunk : own_.chunks) {
      starts_.push_back(bytes);
      bytes += chunk.payload_bytes;
    }
    codes_.resize(bytes);
  }

  Described described() const {
    Described described = plans_.described();
    described.elements = std::to_string(message_.elements);
    return described;
  }

  uint64_t rawBytes() const {
    const uint64_t peers = op_.group.size() - 1;
    const uint64_t all = message_.elements * itemBytes(message_.dtype);
    return all - own_.rawBytes() + peers * own_.rawBytes();  // everybody's slices, then its own to everybody
  }

  Phase scatter() {
    Phase phase;
    phase.out = plans_.all();
    phase.in.assign(op_.group.size(), &own_);
    phase.encode = [this](size_t k, int peer, std::span<std::byte> payload) {
      contributions_.encode(k, peer, payload);
    };
    phase.absorb = [this](size_t k, const std::vector<std::span<const std::byte>>& payloads) {
      contributions_.whole(k, payloads, [&](const Run& run, const auto& whole) { reduce(run, place(k, run), whole); });
    };
    return phase;
  }

  // `scattering`: the number of scatter()'s phase.
  Phase gather(size_t scattering) {
    Phase phase;
    phase.out.assign(op_.group.size(), &own_);
    phase.in = plans_.all();
    phase.same_to_all = true;
    phase.after = scattering;
    phase.ready = [this](size_t k) { return k < own_.chunks.size() ? own_.wholeWith(k) : k; };
    phase.encode = [this](size_t k, int, std::span<std::byte> payload) {
      std::memcpy(payload.data(), codes_.data() + starts_[k], payload.size());
    };
    phase.absorb = [this](size_t k, const std::vector<std::span<const std::byte>>& payloads) {
      for (int rank = 0; rank < op_.group.size(); ++rank) {
        if (rank != op_.group.rank() && !payloads[rank].empty()) take(rank, k, payloads[rank]);
      }
    };
    return phase;
  }

 private:
  std::vector<const void*> inputs() const {
    std::vector<const void*> inputs;
    for (const Slice& slice : slices_)
      inputs.push_back(elementsAt(slice.first));
    return inputs;
  }

  std::vector<float*> residuals() const {
    std::vector<float*> residuals;
    for (const Slice& slice : slices_) {
      if (message_.residual) residuals.push_back(message_.residual + slice.first);
    }
    return residuals;
  }

  std::byte* elementsAt(uint64_t element) const {
    return static_cast<std::byte*>(message_.data) + element * itemBytes(message_.dtype);
  }

  // Where the codes of a run of the own slice stand, given the frame that its last part is in.
  std::span<std::byte> place(size_t k, const Run& run) {
    size_t at = starts_[k];
    for (const Run& before : own_.chunks[k].runs) {
      if (&before == &run) break;
      at += before.bytes;
    }
    return std::span(codes_).subspan(at - run.part, run.whole);
  }

  void reduce(const Run& run, std::span<std::byte> codes, const std::vector<std::span<const std::byte>>& payloads) {
    const int ranks = op_.group.size(), own = op_.group.rank();
    std::vector<Contribution> all(ranks);
    for (int rank = 0; rank < ranks; ++rank)
      all[rank].payload = payloads[rank];
    all[own].own = contributions_.own(run);
    all[own].own_type = contributions_.ownType();
    const Draws draws = message_.draws.slot(static_cast<uint32_t>(own)).again();
    float* lost = message_.residual ? message_.residual + slices_[own].first + run.at : nullptr;
    try {
      run.countInMessage("of the sum", [&] {
        contributions_.fused(run).encodeSum(codes, elementsAt(slices_[own].first + run.at), message_.dtype, all,
                                            reduction_.average ? ranks : 0, run.offset, run.count, draws, lost);
      });
    } catch (const ValueError&) {  // its own numbers may be why
      contributions_.checkOwn(run);
      throw;
    } catch (const WireError&) {
      for (int rank = 0; rank < ranks; ++rank) {  // whose it is
        std::vector<float> decoded(rank == own ? 0 : run.count);
        if (rank == own) continue;
        op_.blame(rank,
                  [&] { run.codec->decode(decoded.data(), DType::float32, payloads[rank], run.offset, run.count); });
      }
      throw;
    }
  }

  // Frame k of the slice that `rank` has reduced.
  void take(int rank, size_t k, std::span<const std::byte> payload) {
    op_.blame(rank, [&] {
      plans_.of(rank).chunks[k].eachRun(payload, [&](const Run& run, std::span<const std::byte> part) {
        const auto whole = incoming_.take(run, rank, part);
        if (!run.last()) return;
        run.codec->decode(elementsAt(slices_[rank].first + run.at), message_.dtype, whole, run.offset, run.count);
      });
    });
  }

  OpContext& op_;
  const AllReduceMessage& message_;
  const Reduction& reduction_;
  const std::vector<Slice> slices_;
  const RankPlans plans_;
  Contributions contributions_;
  const MessagePlan& own_;
  std::vector<size_t> starts_;    // by frame of the own slice: where its payload is in codes_
  std::vector<std::byte> codes_;  // of the own slice, reduced
  IncomingParts incoming_;
};

// Nobody to send to: nothing is encoded, and nothing lost but to the rounding of what was.
void reduceAlone(const AllReduceMessage& message, const Reduction& reduction) {
  const auto codec = makeCodec(message.codec);
  const uint64_t n = message.elements;
  codec->expectTaken(message.data, message.dtype, 0, n, "");
  if (reduction.premultiplied) scale(message.data, message.data, message.dtype, reduction.premultiply, n);
  if (codec->needsRepair(message.data, message.dtype, n)) codec->repair(message.data, message.dtype, n);
  if (!message.residual) return;
  std::vector<float> rounded(n);
  reduceInto(message.residual, message.data, message.dtype, ReduceKind::sum, n);
  reduceFinish(message.data, message.residual, message.dtype, n, 0);
  reduceAssign(rounded.data(), message.data, message.dtype, n);
  for (uint64_t i = 0; i < n; ++i) {
    const float left = message.residual[i] - rounded[i];
    message.residual[i] = std::isfinite(left) ? left : 0;  // as FusedCodec keeps it
  }
}

}  // namespace

void allReduce(OpContext& op, const std::vector<AllReduceMessage>& messages, const Reduction& reduction) {
  std::deque<Reducing> tensors;
  std::vector<Described> described;
  Exchange exchange;
  for (const AllReduceMessage& message : messages) {
    Reducing& tensor = tensors.emplace_back(op, message, reduction);
    described.push_back(tensor.described());
    op.counters.raw_bytes += tensor.rawBytes();
    const size_t scattering = exchange.phases.size();
    exchange.phases.push_back(tensor.scatter());
    exchange.phases.push_back(tensor.gather(scattering));
  }
  if (op.group.size() == 1) {
    for (const AllReduceMessage& message : messages)
      reduceAlone(message, reduction);
    return;
  }
  exchange.description = describeReduction(op.op, described, reduction);
  runExchange(op, exchange);
}

}  // namespace lowcomm
