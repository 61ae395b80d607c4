#include "diloco/outer_message.h"

#include <limits>

#include "base/error.h"
#include "base/float_env.h"
#include "collective/op_context.h"
#include "collective/summer.h"
#include "engine/op_queue.h"
#include "kernels/finite.h"

namespace lowcomm {
namespace {

const Reduction kAverage{ReduceKind::sum, /*average=*/true};

// out = (a − b)·share, without b: a·share. Not inlined: FloatEnv's register must be set before the arithmetic.
__attribute__((noinline)) void make(float* out, const float* a, const float* b, float share, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i)
    out[i] = b ? a[i] - b[i] : a[i];
  if (share == 1) return;
  for (uint64_t i = 0; i < count; ++i)
    out[i] *= share;
}

bool isFinite(const at::Tensor& tensor) {
  return firstNonFinite(tensor.const_data_ptr(), DType::float32, static_cast<uint64_t>(tensor.numel()),
                        std::numeric_limits<float>::infinity()) < 0;
}

}  // namespace

ReduceTensor OuterMessage::inPlace(const at::Tensor& message) {
  in_place_.push_back(message);
  return {static_cast<uint64_t>(message.numel()), message.mutable_data_ptr<float>()};
}

Elsewhere OuterMessage::from(const at::Tensor& x) {
  if (weight > 0) return difference(x, {});
  read_.push_back(x);
  return {.from = x.const_data_ptr<float>()};
}

Elsewhere OuterMessage::difference(const at::Tensor& a, const at::Tensor& b) {
  read_.push_back(a);
  read_.push_back(b);
  const float *x = a.const_data_ptr<float>(), *y = b.defined() ? b.const_data_ptr<float>() : nullptr;
  makers_.emplace_back([this, x, y](float* out, uint64_t first, uint64_t count) {
    const FloatEnv env;
    make(out, x + first, y ? y + first : nullptr, share_, count);
  });
  return {.make = &makers_.back()};
}

// Weights are compared here, behind training: a site that is late would hold the others up otherwise.
void OuterMessage::weigh(OpContext& op) {
  double sum = 0;
  for (const std::vector<double>& one : gatherNumbers({weight}, op))
    sum += one[0];
  ++op.sequence;
  share_ = static_cast<float>(weight * op.size() / sum);
  const FloatEnv env;
  for (const at::Tensor& tensor : in_place_) {
    float* x = tensor.mutable_data_ptr<float>();
    for (int64_t i = 0; i < tensor.numel(); ++i)
      x[i] *= share_;
  }
}

void OuterMessage::run(OpContext& op) {
  for (const auto& compression : compressions)
    compression->settle();
  if (weight > 0) weigh(op);
  op.counters.exact = !exact.empty();
  if (!exact.empty()) {
    allReduce(op, exact, kAverage);
  } else {
    finite = lowRankAllReduce(op, coded, kAverage);
  }
}

bool OuterMessage::inPlaceIsFinite() const {
  for (const at::Tensor& tensor : in_place_) {
    if (!isFinite(tensor)) return false;
  }
  return true;
}

}  // namespace lowcomm
