#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"
#include "codec/fused.h"
#include "collective/context.h"
#include "collective/loss.h"
#include "collective/message_summary.h"
#include "collective/plan.h"
#include "kernels/reduce.h"

namespace lowcomm {

struct Reduction {
  ReduceKind kind = ReduceKind::sum;
  bool average = false;  // divide by the number of ranks, once, after the sum
  double premultiply = 1.0;
  bool premultiplied = false;  // multiply every contribution by `premultiply` before it is encoded

  // "sum", "avg", "premul_sum", "max", ...: the description's field.
  const char* name() const;
};

// describe(), with the reduce op before the codec, which follows from it.
KeyValues describeReduction(const std::string& op, const std::vector<MessageSummary>& messages,
                            const Reduction& reduction);

// Room for `bytes` in memory that is kept from op to op.
std::byte* scratch(std::vector<std::byte>& memory, size_t bytes);

// The first half of every reduction: each rank sends every other the slice that it will own, and an owner gets one
// contribution from each. Throws TypeError for a pair of dtype and kind that reduceSupports refuses.
class Contributions {
 public:
  // `slices` and what `inputs` point to live as long as this. inputs[r]: this rank's elements of the slice for rank r.
  // `draws`: stream of the slice for rank 0; the slice for rank r is r·segments slots on. `residuals`, one a slice or
  // none: what earlier encodings lost, fp32, added to the inputs; they become what this one loses (error feedback), 0
  // in the own slice. ValueError for residuals of a premultiplied sum. `places`, unless null, have elements, residuals
  // and slots in place of these.
  Contributions(OpContext& op, const RankPlans& slices, DType dtype, std::vector<const void*> inputs,
                const Reduction& reduction, const Draws& draws, std::vector<float*> residuals = {},
                const SegmentPlaces* places = nullptr);

  // A rank's own slice is not encoded, so no codec looks at it: a NaN there would reach the result unseen.
  void checkOwn(size_t k);
  void checkOwn(const Run& run);

  // The payload of frame k for `peer`.
  void encode(size_t k, int peer, std::span<std::byte> payload);

  // Hands every run of this rank's slice that is whole with frame k to `sum(run, payloads)`: payloads by rank, its own
  // is empty.
  template <class F>
  void whole(size_t k, const std::vector<std::span<const std::byte>>& payloads, F&& sum) {
    const auto& frames = slices_.of(op_.group.rank()).frames;
    if (k >= frames.size()) return;  // other slices are longer
    size_t at = 0;
    for (const Run& run : frames[k].runs) {
      std::vector<std::span<const std::byte>> parts(payloads.size());
      for (size_t rank = 0; rank < payloads.size(); ++rank) {
        if (payloads[rank].empty()) continue;
        parts[rank] = incoming_.take(run, static_cast<int>(rank), payloads[rank].subspan(at, run.bytes));
      }
      at += run.bytes;
      if (run.last()) sum(run, parts);
    }
  }

  // This rank's elements of its own slice, of ownType(): premultiplied or with their residual, and as the others would
  // see them where the codec saturates. A poisoned bucket's NaN and infinities reach the sum as they are. Valid until
  // the next call.
  const void* own(const Run& run);
  DType ownType(const Run& run) const { return residualOf(run, op_.group.rank()) ? DType::float32 : dtype_; }

  // The residual of a run of the slice for `peer`, or null, and what its encoding draws.
  float* residualOf(const Run& run, int peer) const;
  Draws drawsOf(const Run& run, int peer) const;

  // The codec of a run with the arithmetic around it.
  FusedCodec& fused(const Run& run);

 private:
  const void* contribution(const Run& run, int peer);
  void withFeedback(const void* x, const float* residual, const Window& window);
  void addLost(Loss& loss, const float* residual, const Window& window);

  OpContext& op_;
  const RankPlans& slices_;
  const DType dtype_;
  const std::vector<const void*> inputs_;
  const Reduction& reduction_;
  const Draws draws_;
  const std::vector<float*> residuals_;
  const SegmentPlaces* const places_;
  std::optional<FusedCodec> fused_;
  std::vector<std::byte> repaired_;
  std::vector<float> encoded_, decoded_;  // of the loss's sample
  OutgoingParts outgoing_;
  IncomingParts incoming_;
};

}  // namespace lowcomm
