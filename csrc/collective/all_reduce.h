#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"
#include "codec/spec.h"
#include "collective/context.h"
#include "collective/contributions.h"
#include "collective/plan.h"

namespace lowcomm {

// One tensor to reduce, in place: `data` holds this rank's `elements` elements, then the reduction.
struct AllReduceMessage {
  uint64_t elements = 0;
  CodecSpec codec;  // none: exact, of any dtype that reduceSupports
  DType dtype = DType::float32;
  void* data = nullptr;
  Draws draws;  // stream of the slice for rank 0; that for rank r is r slots on, and its sum's the same in phase 1

  // Error feedback: null, or fp32 elements that hold what this rank's encodings have lost so far. It is added to `data`
  // first and becomes what is lost now, that of the second encoding and of a rounding to `dtype` included: over all
  // ranks Σ data before = Σ (residual after − residual before) + the reduction (W times it for an average), up to fp32
  // rounding. Unspecified when the op fails: the caller keeps a copy, or gives one (Residual).
  float* residual = nullptr;

  // Several tensors in one message: the segments of every rank's slice, each encoded as a tensor of its own by `codec`.
  // `elements` is then their sum; data and residual, and the slots of draws, are theirs. Host memory only. Empty: one
  // tensor, cut by collective/plan.h.
  SegmentPlaces places = {};
};

// all_reduce. The tensor is cut into a slice a rank (collective/plan.h); every rank sends every other its share of
// the slice that it owns, sums what it gets in rank order, divides for an average, and sends the result to all:
// 2(W−1)/W of the bytes go out and come in. The second half is under way while the first still is. A group of one rank
// changes nothing but a scale.
//
// With a codec shares are encoded, sums are fp32, and the result is encoded once more; its owner decodes what it sent,
// so all ranks end with identical bits. A rank's own share of its own slice is not encoded: a finite element there that
// is too large for the codec is refused only if the sum is. Without one (codec none) all kinds of reduction are taken,
// in the elements' own type, fp16 and bf16 in fp32.
//
// Throws as runExchange; ValueError for a codec and a kind other than sum and for a residual of a premultiplied sum,
// TypeError for a dtype that the codec or the kind does not take.
void allReduce(OpContext& op, const std::vector<AllReduceMessage>& messages, const Reduction& reduction);

}  // namespace lowcomm
