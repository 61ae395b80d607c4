#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "collective/all_reduce.h"
#include "kernels/low_rank/low_rank.h"

namespace lowcomm {

// One tensor of a lowRankAllReduce in progress: its part in the two messages, and what becomes of its residual, its
// factor and its elements.
class TensorCompression {
 public:
  // `whole`: memory that tensors of a message share, for one matrix at a time. ValueError for a rank that does not fit.
  TensorCompression(const LowRankTensor& tensor, DType dtype, std::vector<float>& whole);

  const LowRankTensor& tensor() const { return t_; }
  bool lowRank() const { return t_.rank > 0; }
  std::vector<float>& p() { return p_; }
  const std::vector<float>& r() const { return r_; }

  // Into the first message: the elements themselves, or their projection P.
  void share(AllReduceMessage& message, const LowRankKernels& kernels);

  // Into the second: R, with what its coding will lose. The first has taken a slot for each of `ranks`.
  void shareBack(AllReduceMessage& message, const LowRankKernels& kernels, int ranks);

  // Whether what the first message brought, or the second, is finite and P·Rᵀ will be.
  bool firstIsFinite() const;
  bool secondIsFinite() const;

  // The second has come. `times`: how often the result stands for what was sent, the group's size for an average.
  void finish(const LowRankKernels& kernels, bool rounds_here, float times);

  // Takes the place of finish() if the result is not finite.
  void spoil();

  // The factors in which the reduction of a tensor without data stays; the last of all.
  CodedAverage::Tensor reduced();

 private:
  const CodedResidual* coded() const { return t_.elsewhere.coded; }
  bool feedback() const { return t_.residual || coded(); }
  bool isIdle() const;
  std::byte* element(uint64_t at) const { return static_cast<std::byte*>(t_.data) + at * itemBytes(dtype_); }
  const float* elements(uint64_t at, uint64_t count, float* memory) const;
  void addElements(float* sum, uint64_t at, uint64_t count, float* memory) const;
  void finishIdle();
  void widen();
  const float* matrix();
  void write(const LowRankKernels& kernels, float* residual, float times);

  const LowRankTensor& t_;
  const DType dtype_;
  std::vector<float>& whole_;
  const bool idle_;
  uint32_t number_ = 0;  // in the first message
  const float* a_ = nullptr;
  std::vector<float> wide_, p_, r_, own_, lost_;
};

}  // namespace lowcomm
