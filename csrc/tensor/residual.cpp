#include "tensor/residual.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <utility>

namespace lowcomm {

// Whatever mode the caller is in: an inference tensor could not be written outside it.
Residual::Residual(at::IntArrayRef shape) {
  c10::InferenceMode normal(false);
  value_ = at::zeros(shape, at::kFloat);
}

void Residual::expectIdle(const char* what) const {
  TORCH_CHECK_VALUE(!lent_, "lowcomm: residual: ", what,
                    ": expected no op on it under way, got one: wait() for it first");
}

at::Tensor Residual::value() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return value_;
}

void Residual::set(const at::Tensor& value) {
  std::lock_guard<std::mutex> lock(mutex_);
  expectIdle("set");
  TORCH_CHECK_VALUE(value.sizes() == value_.sizes(), "lowcomm: residual: expected shape ", value_.sizes(), ", got ",
                    value.sizes());
  c10::InferenceMode normal(false);
  c10::NoGradGuard no_grad;
  value_ = value.detach().to(at::kCPU, at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous();
}

float* Residual::begin(int64_t numel) {
  std::lock_guard<std::mutex> lock(mutex_);
  expectIdle("a new op");
  TORCH_CHECK_VALUE(numel == value_.numel(), "lowcomm: residual: expected a tensor of ", value_.numel(),
                    " elements, got ", numel);
  c10::InferenceMode normal(false);
  c10::NoGradGuard no_grad;
  if (!next_.defined()) next_ = at::empty_like(value_);
  next_.copy_(value_);
  lent_ = true;
  return next_.mutable_data_ptr<float>();
}

void Residual::commit() {
  std::lock_guard<std::mutex> lock(mutex_);
  // A new tensor where somebody holds the old one: what they have read stays what it was.
  std::swap(value_, next_);
  if (next_.use_count() > 1 || next_.storage().use_count() > 1) next_ = at::Tensor();
  lent_ = false;
}

void Residual::rollBack() {
  std::lock_guard<std::mutex> lock(mutex_);
  lent_ = false;
}

}  // namespace lowcomm
