#pragma once

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>
#include <vector>

#include "adam/quantized_adam.h"

namespace lowcomm {

// The arguments that the optimizers of Adam's kind take from Python.

using Rule = std::tuple<double, double, double, double, double>;  // lr, β1, β2, eps, weight_decay

inline std::vector<AdamRule> rulesOf(const std::vector<Rule>& given) {
  std::vector<AdamRule> rules;
  for (const auto& [lr, beta1, beta2, eps, weight_decay] : given)
    rules.push_back({lr, beta1, beta2, eps, weight_decay});
  return rules;
}

inline std::vector<at::Tensor> definedOf(const std::vector<std::optional<at::Tensor>>& given) {
  std::vector<at::Tensor> tensors;
  for (const auto& tensor : given)
    tensors.push_back(tensor.value_or(at::Tensor()));
  return tensors;
}

}  // namespace lowcomm
