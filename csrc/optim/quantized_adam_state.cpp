// What a checkpoint of QuantizedAdam holds.
#include <c10/core/GradMode.h>

#include "base/error.h"
#include "optim/quantized_adam.h"

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

}  // namespace lowcomm
