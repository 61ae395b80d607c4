#pragma once

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "adam/quantized_adam.h"
#include "codec/spec.h"
#include "tensor/errors.h"

namespace lowcomm {

// Reads an optimizer's options out of the dict that Python gives: those that are not in it keep their defaults.
class OptionReader {
 public:
  // `who` begins an error's text.
  OptionReader(std::string who, const pybind11::dict& given) : who_(std::move(who)), given_(given) {}

  template <class T>
  void take(const char* name, T& field) {
    known_.insert(name);
    if (!given_.contains(name)) return;
    if constexpr (std::is_same_v<T, CodecSpec>) {
      field = CodecSpec::parse(given_[name].cast<std::string>());
    } else {
      field = given_[name].cast<T>();
    }
  }

  // Throws TypeError for an option that nothing has taken: Python's table has a name that is forgotten here.
  void expectAllTaken() const {
    for (const auto& [key, value] : given_) {
      const auto name = key.cast<std::string>();
      if (!known_.contains(name)) throw TypeError(who_ + ": expected options that it has, got '" + name + "'");
    }
  }

 private:
  std::string who_;
  const pybind11::dict& given_;
  std::set<std::string> known_;
};

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
