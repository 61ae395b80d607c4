#include "tensor/compression.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <span>
#include <utility>

#include "base/float_env.h"
#include "collective/all_reduce.h"
#include "kernels/isa/table.h"
#include "kernels/low_rank/low_rank.h"

namespace lowcomm {

namespace {

int64_t product(at::IntArrayRef shape) {
  int64_t numel = 1;
  for (int64_t size : shape)
    numel *= size;
  return numel;
}

void expectLike(const char* what, const at::Tensor& kept, const at::Tensor& given) {
  TORCH_CHECK_VALUE(given.sizes() == kept.sizes() && given.scalar_type() == kept.scalar_type(),
                    "lowcomm: compression: ", what, ": expected ", kept.scalar_type(), " of shape ", kept.sizes(),
                    ", got ", given.scalar_type(), " of shape ", given.sizes());
}

// Not inlined: FloatEnv's register must be set before the arithmetic.
__attribute__((noinline)) void multiply(float* x, size_t n, float factor) {
  for (size_t i = 0; i < n; ++i)
    x[i] *= factor;
}

bool isHeld(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.use_count() > 1 || tensor.storage().use_count() > 1);
}

}  // namespace

Compression::Compression(at::IntArrayRef shape, int64_t rank, double feedback, bool eight_bits, uint64_t seed)
    : shape_(shape.begin(), shape.end()),
      numel_(product(shape)),
      rows_(shape.empty() ? 1 : shape[0]),
      columns_(rows_ == 0 ? 0 : numel_ / rows_),
      rank_(rank),
      feedback_(static_cast<float>(feedback)),
      seed_(seed),
      eight_bits_(eight_bits && feedback > 0 ? makeCodec(CodecSpec::parse(CodedResidual::kEightBits)) : nullptr) {
  expectRank(rank_);
  c10::InferenceMode normal(false);  // whatever mode the caller is in: an inference tensor could not be written outside
  if (feedback_ > 0)
    residual_ = eight_bits_ ? narrowed(at::zeros({numel_}, at::kFloat)) : at::zeros(shape_, at::kFloat);
  if (rank_ == 0) return;
  factor_ = at::zeros({rank_, columns_}, at::kFloat);
  FloatEnv env;
  orthonormaliseWhole(factor_.mutable_data_ptr<float>(), rank_, columns_, seed_);
}

void Compression::expectRank(int64_t rank) const {
  TORCH_CHECK_VALUE(rank == 0 || (rank > 0 && isLowRank(rows_, columns_, rank)),
                    "lowcomm: compression: expected a rank whose factors are smaller than the matrix of ", rows_, " x ",
                    columns_, ", got ", rank);
}

void Compression::expectIdle(const char* what) const {
  TORCH_CHECK_VALUE(loan_ == Loan::idle, "lowcomm: compression: ", what, ": expected no op on it, got one that is ",
                    loan_ == Loan::lent ? "under way" : "not committed");
}

at::Tensor Compression::residual() const {
  std::lock_guard<std::mutex> lock(mutex_);
  settleLocked();
  return residual_;
}

at::Tensor Compression::factor() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return factor_;
}

void Compression::set(const std::optional<at::Tensor>& residual, const std::optional<at::Tensor>& factor) {
  std::lock_guard<std::mutex> lock(mutex_);
  expectIdle("set");
  settleLocked();
  c10::InferenceMode normal(false);
  c10::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(residual.has_value() == residual_.defined() && factor.has_value() == factor_.defined(),
                    "lowcomm: compression: set: expected ", residual_.defined() ? "a" : "no", " residual and ",
                    factor_.defined() ? "a" : "no", " factor, got ", residual ? "a" : "no", " residual and ",
                    factor ? "a" : "no", " factor");
  if (residual) expectLike("residual", residual_, *residual);
  if (factor) expectLike("factor", factor_, *factor);
  const auto copied = [](const at::Tensor& given) {
    return given.detach().to(at::kCPU, given.scalar_type(), /*non_blocking=*/false, /*copy=*/true).contiguous();
  };
  if (residual) residual_ = copied(*residual);
  if (factor) factor_ = copied(*factor);
}

void Compression::setRank(int64_t rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  expectIdle("set rank");
  expectRank(rank);
  TORCH_CHECK_VALUE((rank == 0) == (rank_ == 0), "lowcomm: compression: expected a rank that is ",
                    rank_ == 0 ? "0" : "1 or more", ", as it was, got ", rank);
  if (rank == rank_) return;
  factor_ = factorOf(rank);
  rank_ = rank;
}

at::Tensor Compression::factorOf(int64_t rank) const {
  c10::InferenceMode normal(false);
  c10::NoGradGuard no_grad;
  if (rank == rank_) return factor_.clone();
  at::Tensor factor = at::zeros({rank, columns_}, at::kFloat);
  const int64_t kept = std::min(rank, rank_);
  factor.narrow(0, 0, kept).copy_(factor_.narrow(0, 0, kept));
  FloatEnv env;
  orthonormaliseWhole(factor.mutable_data_ptr<float>(), rank, columns_, seed_);
  return factor;
}

void Compression::scale(double factor) {
  std::lock_guard<std::mutex> lock(mutex_);
  expectIdle("scale");
  settleLocked();
  if (feedback_ == 0) return;
  c10::InferenceMode normal(false);
  c10::NoGradGuard no_grad;
  const at::Tensor scaled = widened().mul(factor);
  residual_ = eight_bits_ ? narrowed(scaled) : scaled;
}

at::Tensor Compression::widened() const {
  if (!eight_bits_) return residual_;
  at::Tensor wide = at::empty(shape_, at::kFloat);
  eight_bits_->decode(wide.mutable_data_ptr<float>(), DType::float32,
                      {static_cast<const std::byte*>(residual_.const_data_ptr()), residual_.nbytes()}, 0, numel_);
  return wide;
}

at::Tensor Compression::narrowed(const at::Tensor& wide) const {
  const auto bytes = static_cast<int64_t>(eight_bits_->encodedBytes(numel_, DType::float32));
  at::Tensor narrow = at::empty({bytes}, at::kByte);
  eight_bits_->encode({static_cast<std::byte*>(narrow.mutable_data_ptr()), static_cast<size_t>(bytes)},
                      wide.const_data_ptr<float>(), DType::float32, 0, numel_, {});
  return narrow;
}

Compression::StateView Compression::begin(int64_t numel) {
  std::lock_guard<std::mutex> lock(mutex_);
  expectIdle("a new op");
  TORCH_CHECK_VALUE(numel == numel_, "lowcomm: compression: expected a tensor of ", numel_, " elements, got ", numel);
  c10::InferenceMode normal(false);
  c10::NoGradGuard no_grad;
  StateView lent;
  if (feedback_ > 0) {
    if (!next_residual_.defined()) next_residual_ = at::empty_like(residual_);
    if (eight_bits_) {
      const auto* kept = static_cast<const std::byte*>(residual_.const_data_ptr());
      auto* next = static_cast<std::byte*>(next_residual_.mutable_data_ptr());
      coded_.emplace(*eight_bits_, static_cast<uint64_t>(numel_), std::span(kept, residual_.nbytes()),
                     std::span(next, next_residual_.nbytes()), feedback_);
      lent.coded = &*coded_;
    } else {
      if (isHeld(residual_)) settleLocked();
      // The op settles it, and then finds them in each other's place.
      lent.kept = (unsettled_ ? next_residual_ : residual_).const_data_ptr<float>();
      lent.residual = (unsettled_ ? residual_ : next_residual_).mutable_data_ptr<float>();
    }
  }
  if (rank_ > 0) {
    next_factor_ = factor_.clone();
    lent.factor = next_factor_.mutable_data_ptr<float>();
  }
  loan_ = Loan::lent;
  return lent;
}

void Compression::end(bool done) {
  std::lock_guard<std::mutex> lock(mutex_);
  loan_ = done ? Loan::done : Loan::idle;
}

bool Compression::done() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return loan_ == Loan::done;
}

void Compression::commit() {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_VALUE(loan_ == Loan::done, "lowcomm: compression: commit: expected an op that has ended well");
  if (feedback_ > 0) std::swap(residual_, next_residual_);
  decays_ = residual_.defined() && !eight_bits_ && feedback_ < 1;
  // A new tensor if the old one is still held elsewhere, or cannot be used again: values that were handed out do not
  // change.
  if (isHeld(next_residual_)) next_residual_ = at::Tensor();
  if (rank_ > 0) factor_ = std::move(next_factor_);
  loan_ = Loan::idle;
}

void Compression::rollBack() {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_VALUE(loan_ != Loan::lent,
                    "lowcomm: compression: roll back: expected an op that has ended, got one "
                    "under way");
  loan_ = Loan::idle;
}

at::Tensor Compression::commitLater(at::Tensor sent, float share, std::vector<float> p, std::vector<float> r) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_VALUE(loan_ == Loan::done, "lowcomm: compression: commit: expected an op that has ended well");
  TORCH_INTERNAL_ASSERT(feedback_ > 0 && !eight_bits_ && !unsettled_ && rank_ > 0);
  unsettled_ = Unsettled{sent.defined(), share, std::move(p), std::move(r)};
  decays_ = feedback_ < 1;
  at::Tensor result = next_residual_;
  if (sent.defined()) next_residual_ = std::move(sent);
  factor_ = std::move(next_factor_);
  loan_ = Loan::idle;
  return result;
}

void Compression::settle() {
  std::lock_guard<std::mutex> lock(mutex_);
  settleLocked();
}

void Compression::settleLocked() const {
  const FloatEnv env;
  if (unsettled_) makeResidual();
  if (std::exchange(decays_, false)) multiply(residual_.mutable_data_ptr<float>(), numel_, feedback_);
}

void Compression::makeResidual() const {
  const auto n = static_cast<size_t>(numel_), rows = static_cast<size_t>(rows_);
  auto* x = next_residual_.mutable_data_ptr<float>();
  const auto* kept = residual_.const_data_ptr<float>();
  if (unsettled_->sent) {
    if (unsettled_->share != 1) multiply(x, n, unsettled_->share);
    kernels().sum(x, kept, x, n);
  } else {
    std::copy_n(kept, n, x);
  }
  const size_t rank = unsettled_->p.size() / rows;
  kernels().low_rank->subtract(x, x, unsettled_->p.data(), unsettled_->r.data(), rows, n / rows, rank);
  std::swap(residual_, next_residual_);
  unsettled_.reset();
}

size_t Compression::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t bytes = unsettled_ ? (unsettled_->p.size() + unsettled_->r.size()) * sizeof(float) : 0;
  for (const at::Tensor& tensor : {residual_, next_residual_, factor_, next_factor_})
    bytes += tensor.defined() ? tensor.nbytes() : 0;
  return bytes;
}

float* Residual::begin(int64_t numel) {
  const Compression::StateView lent = state_.begin(numel);
  std::copy_n(lent.kept, numel, lent.residual);
  return lent.residual;
}

void Residual::commit() {
  state_.end(/*done=*/true);
  state_.commit();
}

}  // namespace lowcomm
