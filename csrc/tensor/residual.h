#pragma once

#include <ATen/ATen.h>

#include <mutex>

namespace lowcomm {

// What a caller's encodings of one tensor have lost so far, lent to ops as a transaction: an op works on a copy, which
// takes the residual's place when the op succeeds and is dropped when it fails. One op at a time. Thread-safe.
class Residual {
 public:
  // Zeros, fp32, in host memory, of the tensor's shape.
  explicit Residual(at::IntArrayRef shape);

  // fp32 on the host. While an op is under way, what it was before.
  at::Tensor value() const;

  // Replaces all elements. ValueError for another shape or while an op is under way.
  void set(const at::Tensor& value);

  // The copy for an op on a tensor of `numel` elements to work on. ValueError for another number, or while another op
  // is under way.
  float* begin(int64_t numel);

  // The op has ended.
  void commit();
  void rollBack();

 private:
  void expectIdle(const char* what) const;

  mutable std::mutex mutex_;
  at::Tensor value_, next_;
  bool lent_ = false;
};

}  // namespace lowcomm
