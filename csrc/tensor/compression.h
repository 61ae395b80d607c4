#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "codec/coded_residual.h"

namespace lowcomm {

// The state of one tensor's compression from step to step: the residual of error feedback and, with a rank, the
// factor that its matrix is projected on (collective/all_reduce.h). An op works on copies; they take the
// state's place when the caller commits, so that ops which stand or fall together do: a step that another bucket's
// infinity spoils changes none. One op between two commits. Thread-safe.
class Compression {
 public:
  // For a contiguous tensor of that shape. `rank`: 0, or, if isLowRank holds for its matrix [size(0), the rest], the
  // rank of the factor, which starts from `seed`, the same on all ranks. `feedback`: the share of a residual that the
  // next op adds (SparseLoCo's β, arXiv 2508.15706), in (0, 1], or 0 for no residual. `eight_bits` keeps the
  // residual in 8 bits an element (CodedResidual::kEightBits), as LoCo does (arXiv 2407.04480); the part of it that 8
  // bits cannot hold is lost.
  // ValueError for a rank that does not fit.
  Compression(at::IntArrayRef shape, int64_t rank, double feedback, bool eight_bits, uint64_t seed);

  // The last committed, settled value. Undefined without one. Residual: what the next op adds, fp32 of the tensor's
  // shape, or the bytes of 8 bits; factor: fp32, [rank, columns]. Not to be written to.
  at::Tensor residual() const;
  at::Tensor factor() const;

  int64_t numel() const { return numel_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  int64_t rank() const { return rank_; }
  uint64_t seed() const { return seed_; }

  // Replaces what residual() and factor() give. ValueError for other shapes or dtypes, or while an op is under way or
  // not committed.
  void set(const std::optional<at::Tensor>& residual, const std::optional<at::Tensor>& factor);

  // Changes the rank: the factor's leading vectors stay, others are drawn from the seed. ValueError as the constructor,
  // for one to or from 0, and as set().
  void setRank(int64_t rank);
  at::Tensor factorOf(int64_t rank) const;  // the factor of that rank, a copy

  // Multiplies the residual: gradients come in another unit from now on. ValueError as set().
  void scale(double factor);

  // The memory that an op on a tensor of `numel` elements works on: `residual`, to be copied from `kept` first, or in 8
  // bits `coded`. The op settles it before it reads. ValueError for another number, or while an op is in progress or
  // not committed.
  struct StateView {
    float* residual = nullptr;
    const float* kept = nullptr;
    const CodedResidual* coded = nullptr;
    float* factor = nullptr;
  };
  StateView begin(int64_t numel);

  // The op has ended: `done` where its copies may be committed, which waits for commit(); else they are dropped.
  void end(bool done);

  // Whether the op since the last commit or roll back has ended with copies that may be committed.
  bool done() const;

  void commit();
  void rollBack();

  // commit() for an op that has put its result where the residual was to be (Elsewhere::in_residual): the residual is
  // (kept + sent·share) − P·Rₛᵀ, or kept − P·Rₛᵀ if `sent` is undefined. `p` is [rank, rows], `r`, Rₛ, is [rank,
  // columns], `sent` fp32 of the tensor's shape. The first thread that needs it computes it, preferably the next op on
  // its worker: settle(). Takes `sent`, and returns the memory that holds the result. ValueError as commit().
  at::Tensor commitLater(at::Tensor sent, float share, std::vector<float> p, std::vector<float> r);
  void settle();

  // Bytes of residuals and factors, including those that an op works on.
  size_t bytes() const;

 private:
  enum class Loan { idle, lent, done };
  void expectIdle(const char* what) const;
  void expectRank(int64_t rank) const;
  void settleLocked() const;
  void makeResidual() const;   // of what is unsettled
  at::Tensor widened() const;  // of residual_
  at::Tensor narrowed(const at::Tensor&) const;

  const std::vector<int64_t> shape_;
  const int64_t numel_, rows_, columns_;
  int64_t rank_;
  const float feedback_;
  const uint64_t seed_;
  const std::shared_ptr<const Codec> eight_bits_;  // null: fp32

  mutable std::mutex mutex_;
  mutable at::Tensor residual_, next_residual_;
  at::Tensor factor_, next_factor_;
  std::optional<CodedResidual> coded_;
  Loan loan_ = Loan::idle;
  struct Unsettled {  // the residual is still to be made of itself and of what stands in next_residual_
    bool sent;
    float share;
    std::vector<float> p, r;
  };
  mutable std::optional<Unsettled> unsettled_;
  mutable bool decays_ = false;  // the residual, once it is made, is still to be multiplied by `feedback`
};

// The error-feedback residual of one tensor, for ops that each stand alone: an op works on a copy, which replaces the
// residual only if the op succeeds. One op at a time. Thread-safe.
class Residual {
 public:
  // Zeros, fp32, in host memory, of the tensor's shape.
  explicit Residual(at::IntArrayRef shape) : state_(shape, 0, /*feedback=*/1, /*eight_bits=*/false, 0) {}

  // fp32 on the host. While an op is under way, what it was before.
  at::Tensor value() const { return state_.residual(); }

  // Replaces all elements. ValueError for another shape or while an op is under way.
  void set(const at::Tensor& value) { state_.set(value.to(at::kFloat), std::nullopt); }

  // The copy for an op on a tensor of `numel` elements to work on. ValueError for another number, or while another op
  // is under way.
  float* begin(int64_t numel);

  // The op has ended.
  void commit();
  void rollBack() { state_.end(/*done=*/false); }

 private:
  Compression state_;
};

}  // namespace lowcomm
