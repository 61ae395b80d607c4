#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

#include "adam/quantized_adam.h"
#include "base/error.h"

// The contents of a checkpoint of QuantizedAdam.

namespace lowcomm {

std::vector<QuantizedAdam::State> QuantizedAdam::state() const {
  std::vector<State> all;
  for (const ParameterState& kept : kept_) {
    State& state = all.emplace_back();
    state["step"] = at::scalar_tensor(kept.steps, at::kLong);
    state["variance_step"] = at::scalar_tensor(kept.variance_steps, at::kLong);
    state["exp_avg"] = kept.momentum;
    state["exp_avg_sq"] = kept.variance;
    if (kept.rounding.defined()) state["rounding"] = kept.rounding;
    state["residual"] = kept.compression->residual();
  }
  return all;
}

void QuantizedAdam::load(const std::vector<State>& given) {
  const c10::NoGradGuard no_grad;
  const std::vector<State> own = state();
  if (given.size() != own.size()) {
    throw ValueError(
        c10::str("QuantizedAdam: load: expected the state of ", own.size(), " parameters, got ", given.size()));
  }
  for (size_t i = 0; i < own.size(); ++i) {
    for (const auto& [key, like] : own[i]) {
      const std::string& name = kept_[i].parameter.name;
      const auto found = given[i].find(key);
      if (found == given[i].end()) {
        throw ValueError(c10::str("QuantizedAdam: load: ", name, ": expected '", key, "' in the state, got none"));
      }
      const at::Tensor& tensor = found->second;
      if (tensor.sizes() != like.sizes() || tensor.scalar_type() != like.scalar_type()) {
        throw ValueError(c10::str("QuantizedAdam: load: ", name, ": ", key, ": expected ", like.toString(),
                                  " of shape ", like.sizes(), ", got ", tensor.toString(), " of shape ",
                                  tensor.sizes()));
      }
    }
  }
  for (size_t i = 0; i < own.size(); ++i) {
    ParameterState& kept = kept_[i];
    const State& state = given[i];
    kept.steps = state.at("step").item<int64_t>();
    kept.variance_steps = state.at("variance_step").item<int64_t>();
    kept.least = -1;
    kept.momentum.copy_(state.at("exp_avg"));
    kept.variance.copy_(state.at("exp_avg_sq"));
    if (kept.rounding.defined()) kept.rounding.copy_(state.at("rounding"));
    kept.compression->set(state.at("residual"), std::nullopt);
  }
  agreed_ = false;
}

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
