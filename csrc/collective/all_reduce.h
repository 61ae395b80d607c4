#pragma once

#include <cstdint>
#include <vector>

#include "codec/codec.h"
#include "codec/spec.h"
#include "collective/context.h"
#include "collective/contributions.h"
#include "collective/segment_place.h"
#include "kernels/dtype.h"

namespace lowcomm {

// One tensor to reduce, in place: `data` holds this rank's `elements` elements, then the reduction.
struct AllReduceMessage {
  uint64_t elements = 0;
  CodecSpec codec;  // not none
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
  // tensor, cut by collective/slices.h.
  SegmentPlaces places = {};
};

// all_reduce of codes. The tensor is cut into a slice a rank (collective/slices.h); every rank sends every other its
// encoded share of the slice that it owns, sums what it gets in rank order in fp32, divides for an average, encodes the
// result once more and sends that to all, itself decoding what it sent: all ranks end with identical bits. 2(W−1)/W of
// the codes go out and come in. A rank's own share of its own slice is not encoded: a finite element there that is too
// large for the codec is refused only if the sum is. The second half is under way while the first still is. A group of
// one rank changes nothing but a scale. Throws as runExchange; ValueError for a kind other than sum and for a residual
// of a premultiplied sum, TypeError for a dtype that the codec does not take and for the codec none.
void allReduce(OpContext& op, const std::vector<AllReduceMessage>& messages, const Reduction& reduction);

}  // namespace lowcomm
