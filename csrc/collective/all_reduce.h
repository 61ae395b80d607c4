#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"
#include "codec/spec.h"
#include "collective/coded_sums.h"
#include "collective/plan.h"

namespace lowcomm {

class DeviceCodec;
class OpContext;
struct Reduction;

// One tensor to reduce, in place: `data` holds this rank's `elements` elements, then the reduction. Null: they come
// from elsewhere (Elsewhere), and the reduction stays in its codes (AllReduceMessage::sums).
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

  Elsewhere elsewhere = {};
};

// Tensors that travel together: all of one type, by one codec. Each is cut into slices, encoded and drawn for by
// itself, so its result does not depend on the others.
struct AllReduceMessage {
  // One tensor.
  AllReduceMessage(uint64_t elements, const CodecSpec& codec, DType dtype, void* data, const Draws& draws = {},
                   float* residual = nullptr)
      : codec(codec), dtype(dtype), draws(draws), tensors{{elements, data, residual}} {}
  // Several: with a codec.
  AllReduceMessage(const CodecSpec& codec, DType dtype, const Draws& draws, std::vector<ReduceTensor> tensors = {})
      : codec(codec), dtype(dtype), draws(draws), tensors(std::move(tensors)) {}

  CodecSpec codec;  // none: exact, of any dtype that reduceSupports
  DType dtype;
  Draws draws;  // stream of slot 0: the slice for rank r is r slots on, and its sum's the same in phase 1
  std::vector<ReduceTensor> tensors;
  std::shared_ptr<CodedSums>* sums = nullptr;  // takes the reductions of tensors without data; null: there are none
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
// for several exact tensors in one message, and for one without data that is exact, not fp32, on a device, or in a
// group of one rank, where nothing is encoded.
void allReduce(OpContext& op, const std::vector<AllReduceMessage>& messages, const Reduction& reduction,
               DeviceCodec* device_codec = nullptr);

// One tensor of a compressed all_reduce: by codes, or, where `rank` is not 0, by codes of its low-rank factors.
struct LowRankTensor {
  void* data = nullptr;  // contiguous: this rank's elements, then the reduction
  uint64_t elements = 0;

  // Error feedback: null, or fp32 elements that become what this rank's compression has lost so far. What it had lost
  // before stands in `kept`; where that is null, in `residual` itself.
  float* residual = nullptr;
  const float* kept = nullptr;

  // The matrix that the elements are, row-major, and `factor`, [rank, columns] in fp32: orthonormal vectors, the same
  // on all ranks, that its rows are projected on; then those of the next call (warm start). 1 <= rank < rows, columns.
  uint64_t rows = 0, columns = 0, rank = 0;
  float* factor = nullptr;
  uint64_t seed = 0;  // of what replaces a vector of the factor that died out; the same on all ranks

  uint64_t slot = 0;         // of the draws: the tensor takes 2 a rank of the group from here on
  uint32_t first_owner = 0;  // the rank, modulo the group's size, that sums its first slice

  double* energies = nullptr;  // null, or `rank` numbers that become the result's squared singular values, descending

  Elsewhere elsewhere = {};  // of a tensor without data, whose reduction stays in codes or factors
};

struct LowRankMessage {
  DType dtype = DType::float32;
  CodecSpec codec;       // not none; nonfinite=poison, for what the result says of them to be the same everywhere
  CodecSpec projection;  // P's, likewise
  Draws draws;           // stream of this rank, slot 0
  std::vector<LowRankTensor> tensors;
  CodedAverage* average = nullptr;  // takes the reductions of tensors without data; null: there are none
};

// Whether factors of that rank are smaller than the matrix.
constexpr bool isLowRank(uint64_t rows, uint64_t columns, uint64_t rank) {
  return rows * columns > rank * (rows + columns);
}

// Sums or averages tensors over a group by few bits, all of them in one coded message, and those with a rank in two,
// one that depends on the other (Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019; with coded factors as in DiLoCoX,
// arXiv 2506.21263, section 2.4.2). With A = data + residual, Q the factor, and C the coded all_reduce (all_reduce.h):
//
//   P = C(A·Q), orthonormalised;  R = C(Aᵀ·P);  data = P·Rᵀ;  residual = A − P·Rₛᵀ;  Q = R, orthonormalised
//
// where Rₛ is what this rank's Aᵀ·P has come to in R: its codes, or its own numbers in slices that it sums, less what
// coding those sums lost. So, over all ranks, Σ data before = Σ (residual after − residual before) + the sum, as in
// all_reduce.h, of tensors with a rank and without. The loss of P's coding needs no feedback, P being any basis; but a
// coarse one catches less of A, so P may have another codec.
//
// A rank's tensor whose elements are all 0 contributes nothing, and its residual waits: a parameter that took no part.
//
// The result's bits are the same on all ranks, on every CPU, and do not depend on what else is in the message: every
// tensor is cut, drawn for and shared out by itself. Returns whether the result is finite, which is the same on all
// ranks; where it is not, every tensor with a rank is NaN, residuals and factors are unspecified, and the caller keeps
// its copies.
//
// Where a tensor has a rank it takes two sequence numbers, op.sequence and the next. Host memory. Throws as allReduce;
// ValueError for a premultiplied sum, and for a rank that is not as above.
bool lowRankAllReduce(OpContext& op, const LowRankMessage& message, const Reduction& reduction);

}  // namespace lowcomm
