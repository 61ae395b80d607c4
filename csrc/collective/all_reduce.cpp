#include "collective/all_reduce.h"

#include <cmath>
#include <cstddef>
#include <span>

#include "base/error.h"
#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "collective/rank_order_sum.h"
#include "collective/reduce_tensors.h"
#include "collective/reduced_slices.h"

namespace lowcomm {
namespace {

// One tensor: contributions to its slices, sums, and their codes.
class Reducing {
 public:
  Reducing(OpContext& op, const AllReduceMessage& message, const Reduction& reduction)
      : op_(op),
        message_(message),
        reduction_(reduction),
        slices_(op, message),
        contributions_(op, slices_.plans(), message.dtype, slices_.inputs(), reduction, message.draws, residuals(),
                       message.places.empty() ? nullptr : &message.places) {
    if (exact() && message.residual) throw ValueError("all_reduce: expected no residual of exact elements, got one");
    if (!exact() && reduction.kind != ReduceKind::sum) {
      throw ValueError(std::string("all_reduce of codes: expected a sum, got ") + reduceName(reduction.kind));
    }
  }

  MessageSummary described() const { return slices_.described(); }
  uint64_t rawBytes() const { return slices_.rawBytes(); }

  void add(Exchange& exchange) {
    exchange.phases.push_back(&first_);
    exchange.phases.push_back(&second_);
  }

  void start(size_t /*k*/) {}
  void encode(size_t k, int peer, std::span<std::byte> payload) { contributions_.encode(k, peer, payload); }
  void reduce(size_t k, const Payloads& payloads) {
    contributions_.whole(k, payloads,
                         [&](const Run& run, const auto& whole) { reduce(run, slices_.codes(k, run), whole); });
  }
  void encodeSums(size_t k, std::span<std::byte> payload) { slices_.copyCodes(k, payload); }

  // Frame k of the slice that `rank` has reduced.
  void take(int rank, size_t k, std::span<const std::byte> payload) {
    op_.attribute(rank, [&] {
      slices_.plans().of(rank).frames[k].eachRun(payload, [&](const Run& run, std::span<const std::byte> part) {
        const auto whole = incoming_.take(run, rank, part);
        if (!run.last()) return;
        run.codec->decode(slices_.elements(rank, run), message_.dtype, whole, run.offset, run.count);
      });
    });
  }

 private:
  bool exact() const { return message_.codec.id == CodecId::none; }

  std::vector<float*> residuals() const {
    std::vector<float*> residuals;
    for (int rank = 0; message_.places.empty() && message_.residual && rank < slices_.ranks(); ++rank)
      residuals.push_back(message_.residual + slices_.first(rank));
    return residuals;
  }

  void reduce(const Run& run, std::span<std::byte> codes, const std::vector<std::span<const std::byte>>& payloads) {
    const int ranks = slices_.ranks(), own = slices_.rank();
    if (exact()) {
      std::byte* sum = slices_.elements(own, run);
      sumInRankOrder(op_, contributions_, run, payloads, sum, message_.dtype, reduction_);
      return run.encode(codes, sum, message_.dtype, {}, "of the sum");
    }
    std::vector<Contribution> all(ranks);
    for (int rank = 0; rank < ranks; ++rank)
      all[rank].payload = payloads[rank];
    all[own].own = contributions_.own(run);
    all[own].own_type = contributions_.ownType(run);
    const Draws draws = contributions_.drawsOf(run, own).again();
    float* lost = contributions_.residualOf(run, own);
    try {
      run.countInMessage("of the sum", [&] {
        contributions_.fused(run).encodeSum(codes, slices_.elements(own, run), message_.dtype, all,
                                            reduction_.average ? ranks : 0, run.offset, run.count, draws, lost);
      });
    } catch (const ValueError&) {  // its own numbers may be why
      contributions_.checkOwn(run);
      throw;
    } catch (const WireError&) {
      for (int rank = 0; rank < ranks; ++rank) {  // whose it is
        std::vector<float> decoded(rank == own ? 0 : run.count);
        if (rank == own) continue;
        op_.attribute(
            rank, [&] { run.codec->decode(decoded.data(), DType::float32, payloads[rank], run.offset, run.count); });
      }
      throw;
    }
  }

  OpContext& op_;
  const AllReduceMessage& message_;
  const Reduction& reduction_;
  ReducedSlices slices_;
  Contributions contributions_;
  IncomingParts incoming_;
  SendSlices<Reducing> first_{*this, slices_};
  SendSums<Reducing> second_{*this, slices_};
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
  if (op.group.size() > 1) return reduceTensors<Reducing>(op, messages, reduction);
  for (const AllReduceMessage& message : messages)
    Reducing(op, message, reduction);  // throws where it would
  for (const AllReduceMessage& message : messages) {
    if (message.places.empty()) reduceAlone(message, reduction);
    for (const auto& slice : message.places) {
      for (const ScatterEntry& place : slice)
        reduceAlone({place.count, message.codec, message.dtype, place.data, message.draws, place.residual}, reduction);
    }
  }
}

}  // namespace lowcomm
