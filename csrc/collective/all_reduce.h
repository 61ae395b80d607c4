#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"
#include "codec/spec.h"

namespace lowcomm {

class DeviceCodec;
class OpContext;
struct Reduction;

// One tensor to reduce, in place: `data` holds this rank's `elements` elements, then the reduction.
struct ReduceTensor {
  uint64_t elements = 0;
  void* data = nullptr;

  // Error feedback: null, or fp32 elements that hold what this rank's encodings have lost so far. It is added to `data`
  // first and becomes what is lost now, that of the second encoding and of a rounding to `dtype` included: over all
  // ranks Σ data before = Σ (residual after − residual before) + the reduction (W times it for an average), up to fp32
  // rounding. Unspecified when the op fails: the caller keeps a copy, or gives one (Residual).
  float* residual = nullptr;

  uint64_t slot = 0;         // of the message's draws: the tensor takes one for each rank from here on
  uint32_t first_owner = 0;  // the rank, modulo the group's size, that sums its first slice
};

// Tensors that travel together: all of one type, by one codec. Each is cut into slices, encoded and drawn for by
// itself, so its result does not depend on the others.
struct AllReduceMessage {
  // One tensor.
  AllReduceMessage(uint64_t elements, const CodecSpec& codec, DType dtype, void* data, const Draws& draws = {},
                   float* residual = nullptr)
      : codec(codec), dtype(dtype), draws(draws), tensors{{elements, data, residual}} {}
  // Several: in host memory, with a codec.
  AllReduceMessage(const CodecSpec& codec, DType dtype, const Draws& draws, std::vector<ReduceTensor> tensors = {})
      : codec(codec), dtype(dtype), draws(draws), tensors(std::move(tensors)) {}

  CodecSpec codec;  // none: exact, of any dtype that reduceSupports
  DType dtype;
  Draws draws;  // stream of slot 0: the slice for rank r is r slots on, and its sum's the same in phase 1
  std::vector<ReduceTensor> tensors;
};

// all_reduce. Every tensor is cut into a slice a rank (slicesOf in collective/plan.h), whose owner sums what it gets
// from the others in rank order, divides for an average, and sends the result to all: 2(W−1)/W of the bytes go out and
// come in. The second half is under way while the first still is. A group of one rank changes nothing but a scale.
//
// With a codec shares are encoded, sums are fp32, and the result is encoded once more; its owner decodes what it sent,
// so all ranks end with identical bits. A rank's own share of its own slice is not encoded: a finite element there that
// is too large for the codec is refused only if the sum is. Without one (codec none) all kinds of reduction are taken,
// in the elements' own type, fp16 and bf16 in fp32.
//
// The elements are in host memory, or where `device_codec` is, with the limits of makeSummer; frames, bits and errors
// are the same. Throws as runExchange and makeSummer; TypeError for a dtype that the codec does not take, ValueError
// for several exact tensors in one message.
void allReduce(OpContext& op, const std::vector<AllReduceMessage>& messages, const Reduction& reduction,
               DeviceCodec* device_codec = nullptr);

}  // namespace lowcomm
