#pragma once

#include <cstddef>
#include <cstdint>

namespace lowcomm {

// The arithmetic of Adam's steps on spans of fp32, in the order of torch.optim.AdamW. Every operation is rounded by
// itself and in the order written, so that equal averages give equal parameters on every CPU; called under FloatEnv.

// Elements of one tensor. Those that a function does not name may be null.
struct AdamSpan {
  float* parameter;       // θ
  float* rounding;        // what writing θ in its own dtype took from it; null where that is fp32
  const float* gradient;  // g, the rank's own or the average
  float* momentum;        // m
  float* variance;        // v
  float* message;         // the rank's own part of the update, then the average
  size_t n;
};

// One parameter group's hyper-parameters.
struct AdamRule {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double weight_decay = 0;  // decoupled: θ ← θ − lr·weight_decay·θ
};

// The denominators √v̂ + eps, v̂ = max(v, least) / (1 − β2^updates).
struct AdamScale {
  int64_t updates;  // of v
  float least;
};

// Step t, counted from 1, with the averaged gradient: m ← β1·m + (1−β1)·g, v ← β2·v + (1−β2)·g², and
// θ ← θ − lr·weight_decay·θ − lr·m̂ / (√v̂ + eps) (Kingma and Ba, arXiv 1412.6980, Algorithm 1, with the weight decay
// of Loshchilov and Hutter, arXiv 1711.05101, Algorithm 2).
void stepAdam(const AdamSpan& s, const AdamRule& rule, int64_t t);

// The least v that a frozen denominator uses: (1−β2)·mean of v.
float leastVariance(const float* variance, size_t n, double beta2);

// message = (β1·m + (1−β1)·g) / (√v̂ + eps), of the rank's own gradient; m and v stay.
void formUpdate(const AdamSpan& s, const AdamRule& rule, const AdamScale& scale);

// Step t with the average of the messages, u: m ← u·(√v̂ + eps), θ ← θ − lr·weight_decay·θ − lr·u / (1 − β1^t).
void stepFrozen(const AdamSpan& s, const AdamRule& rule, const AdamScale& scale, int64_t t);

}  // namespace lowcomm
