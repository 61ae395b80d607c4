#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "collective/plan.h"

namespace lowcomm {

// The codes of a slice's sums, frame after frame.
class SumCodes {
 public:
  // `slice` outlives this.
  explicit SumCodes(const MessagePlan& slice);

  // The bytes of a whole run, given the number of the frame that holds its last part.
  std::span<std::byte> of(size_t k, const Run& run) { return std::span(bytes_).subspan(at(k, run), run.whole); }
  std::span<const std::byte> of(size_t k, const Run& run) const {
    return std::span(bytes_).subspan(at(k, run), run.whole);
  }

  // The payload of frame k: written there, and taken from there.
  void copy(size_t k, std::span<std::byte> payload) const;
  void take(size_t k, std::span<const std::byte> payload);

  size_t bytes() const { return bytes_.size(); }

 private:
  size_t at(size_t k, const Run& run) const;

  const MessagePlan& slice_;
  std::vector<size_t> starts_;  // by frame: where its payload is in bytes_
  std::vector<std::byte> bytes_;
};

// Where the elements of a tensor without data come from, fp32, and what its residual is kept in.
struct Elsewhere {
  const float* from = nullptr;         // all of them; null: `make`
  const MakeElements* make = nullptr;  // lives until the op has ended
  const CodedResidual* coded = nullptr;
  bool in_residual = false;  // the reduction of a tensor with a rank takes its fp32 residual's place (CodedAverage)
};

// Elements [first, first + count) of a tensor, decoded; the caller may write to them.
using TakeElements = std::function<void(uint64_t first, uint64_t count, float* x)>;

// The result of an all_reduce as its codes, those of this rank's slice and those that came: some half a byte an element
// in 4 bits, where the elements would take 4.
class CodedSums {
 public:
  CodedSums(std::shared_ptr<const RankPlans> slices, const ScatterEntries& entries);

  // The codes of the slice that a rank owns.
  SumCodes& of(int owner) { return codes_[owner]; }

  // Calls with all elements of a tensor of the message, piece by piece and in order. After the op.
  void decode(uint32_t tensor, const TakeElements& take) const;

  // Whether all elements are finite: what was seen of them while they came.
  bool finite() const { return finite_; }
  void see(const float* x, uint64_t count);

  size_t bytes() const;

 private:
  struct Place {  // of a whole run
    int owner;
    size_t frame, run;
    uint64_t first;  // of the run in its tensor
  };

  std::shared_ptr<const RankPlans> slices_;
  std::vector<SumCodes> codes_;             // by owner
  std::vector<std::vector<Place>> places_;  // by tensor, in the order of its elements
  bool finite_ = true;
};

// The result of a lowRankAllReduce whose tensors have no data: in codes, and of tensors with a rank in their factors,
// P and R, or in the place of their residuals, decoded: that needs no more memory. The new residual is then
// for the caller to compute, data + residual − P·Rₛᵀ (Compression::commitLater).
class CodedAverage {
 public:
  // Calls with all elements of a tensor of the message, in order, some rows at a time of one with a rank. Called under
  // FloatEnv.
  void decode(size_t tensor, const TakeElements& take) const;

  size_t bytes() const;

  // The values that the op makes of it.
  struct Tensor {
    uint32_t number = 0;  // among the tensors of `sums`
    uint64_t rows = 0, columns = 0, rank = 0;
    std::vector<float> p = {}, r = {};  // [rank, rows], [rank, columns]; in a residual's place P and Rₛ
    float* whole = nullptr;             // in a residual's place, or in `own`
    bool idle = false;                  // whole: the data was 0, which leaves it out
    std::vector<float> own = {};
  };
  std::shared_ptr<CodedSums> sums;
  std::vector<Tensor> tensors;
};

}  // namespace lowcomm
