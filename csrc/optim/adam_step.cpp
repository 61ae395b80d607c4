#include "optim/adam_step.h"

#include <algorithm>
#include <cmath>

namespace lowcomm {
namespace {

double correction(double beta, int64_t t) {
  return 1 - std::pow(beta, static_cast<double>(t));
}

// θ as it is before its rounding.
inline float whole(const AdamSpan& s, size_t i) {
  return s.rounding ? s.parameter[i] + s.rounding[i] : s.parameter[i];
}

struct Denominators {
  Denominators(const AdamRule& rule, const AdamScale& scale)
      : least(scale.least),
        root(static_cast<float>(std::sqrt(correction(rule.beta2, scale.updates)))),
        eps(static_cast<float>(rule.eps)) {}

  float operator()(float v) const { return std::sqrt(std::max(v, least)) / root + eps; }

  float least, root, eps;
};

}  // namespace

void stepAdam(const AdamSpan& s, const AdamRule& rule, int64_t t) {
  const Denominators denominator(rule, {t, 0});
  const auto keep = static_cast<float>(1 - rule.lr * rule.weight_decay);
  const auto weight1 = static_cast<float>(1 - rule.beta1), weight2 = static_cast<float>(1 - rule.beta2);
  const auto beta2 = static_cast<float>(rule.beta2), step = static_cast<float>(-rule.lr / correction(rule.beta1, t));
  for (size_t i = 0; i < s.n; ++i) {
    const float g = s.gradient[i], m = s.momentum[i] + weight1 * (g - s.momentum[i]);
    const float v = s.variance[i] * beta2 + weight2 * g * g;
    s.momentum[i] = m;
    s.variance[i] = v;
    s.parameter[i] = whole(s, i) * keep + step * m / denominator(v);
  }
}

float leastVariance(const float* variance, size_t n, double beta2) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i)
    sum += variance[i];
  return n == 0 ? 0 : static_cast<float>((1 - beta2) * sum / static_cast<double>(n));
}

void formUpdate(const AdamSpan& s, const AdamRule& rule, const AdamScale& scale) {
  const Denominators denominator(rule, scale);
  const auto weight = static_cast<float>(1 - rule.beta1);
  for (size_t i = 0; i < s.n; ++i)
    s.message[i] = (s.momentum[i] + weight * (s.gradient[i] - s.momentum[i])) / denominator(s.variance[i]);
}

void stepFrozen(const AdamSpan& s, const AdamRule& rule, const AdamScale& scale, int64_t t) {
  const Denominators denominator(rule, scale);
  const auto keep = static_cast<float>(1 - rule.lr * rule.weight_decay);
  const auto step = static_cast<float>(-rule.lr / correction(rule.beta1, t));
  for (size_t i = 0; i < s.n; ++i) {
    s.momentum[i] = s.message[i] * denominator(s.variance[i]);
    s.parameter[i] = whole(s, i) * keep + step * s.message[i];
  }
}

}  // namespace lowcomm
