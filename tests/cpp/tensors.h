#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "errors.h"

namespace lowcomm::test {

// To the bit.
inline void expectEqual(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_TRUE(at::equal(a[i], b[i])) << "tensor " << i;
}

// An optimizer's state by parameter, with tensors of its own.
template <class State>
std::vector<State> copied(std::vector<State> states) {
  for (State& state : states) {
    for (auto& [key, tensor] : state)
      tensor = tensor.clone();
  }
  return states;
}

}  // namespace lowcomm::test
