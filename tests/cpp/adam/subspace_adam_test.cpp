#include "adam/subspace_adam.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "tensors.h"

namespace lowcomm {
namespace {

using test::expectEqual;

constexpr int64_t kWidth = 96, kRank = 8, kUnits = 200, kTokens = 900;  // T_S: two tiles
const std::vector<AdamRule> kRules = {{0.01, 0.9, 0.98, 1e-8, 0.1}, {0.002, 0.8, 0.95, 1e-6, 0}};

at::Tensor noise(at::IntArrayRef shape, uint64_t seed, at::ScalarType dtype) {
  return at::randn(shape, at::detail::createCPUGenerator(1 + seed), at::kDouble).to(dtype);
}

// Uᵀ.
at::Tensor vectors() {
  return std::get<0>(at::linalg_qr(noise({kWidth, kRank}, 99, at::kDouble))).t().contiguous();
}

at::Tensor inSubspace(const at::Tensor& w, int64_t axis, at::ScalarType dtype) {
  if (w.dim() == 1) return inSubspace(w.unsqueeze(1), axis, dtype).squeeze(1);
  const at::Tensor u = vectors(), wide = w.to(at::kDouble);
  return (axis == 0 ? u.t().mm(u.mm(wide)) : wide.mm(u.t()).mm(u)).to(dtype);
}

// W_p1, W_p2, T_S, a bias in S, and two plain parameters in two groups.
struct Trainee {
  SubspaceAdam adam;
  std::vector<SubspaceParameter> parameters;

  explicit Trainee(at::ScalarType dtype) {
    const at::Tensor u = vectors();
    const auto weight = [&](const char* name, at::IntArrayRef shape, SubspaceRule rule, int64_t axis) {
      const at::Tensor w = inSubspace(noise(shape, parameters.size(), at::kDouble), axis, dtype);
      parameters.push_back({name, w, parameters.size() % 2, rule, axis, u, kWidth});
    };
    weight("out", {kWidth, kWidth}, SubspaceRule::projected, 0);
    weight("down", {kWidth, kUnits}, SubspaceRule::rows, 0);
    weight("embedding", {kTokens, kWidth}, SubspaceRule::projected, 1);
    const at::Tensor bias = inSubspace(noise({kWidth}, 5, at::kDouble), 0, dtype);
    parameters.push_back({"down.bias", bias, 1, SubspaceRule::projected, 0, u, kWidth});
    parameters.push_back({"up", noise({kUnits, kWidth}, 3, dtype), 1});
    parameters.push_back({"bias", noise({kUnits}, 4, dtype), 0});
    adam.add(parameters);
  }

  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all;
    for (const auto& p : parameters)
      all.push_back(p.tensor);
    return all;
  }

  std::vector<at::Tensor> gradients(int64_t step) const {
    std::vector<at::Tensor> all;
    for (size_t i = 0; i < parameters.size(); ++i)
      all.push_back(noise(parameters[i].tensor.sizes(), 1000 + 10 * step + i, parameters[i].tensor.scalar_type()));
    return all;
  }

  void step(const std::vector<at::Tensor>& gradients) {
    for (const at::Tensor& slice : adam.project(gradients))
      EXPECT_FALSE(slice.defined());
    for (const at::Tensor& slice : adam.form(tensors(), gradients, kRules))
      EXPECT_FALSE(slice.defined());
    adam.apply(tensors(), kRules);
  }

  void train(int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i)
      step(gradients(i));
  }

  // Copies of parameters and state.
  std::vector<at::Tensor> all() const {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& tensor : tensors())
      copies.push_back(tensor.clone());
    for (const auto& state : adam.state()) {
      for (const auto& [key, tensor] : state)
        copies.push_back(tensor.clone());
    }
    return copies;
  }
};

// The formulas of subspace_adam.h, with whole matrices.
void stepByHand(Trainee& t, std::vector<std::pair<at::Tensor, at::Tensor>>& moments,
                const std::vector<at::Tensor>& gradients, int64_t step) {
  for (size_t i = 0; i < t.parameters.size(); ++i) {
    const SubspaceParameter& p = t.parameters[i];
    const AdamRule& rule = kRules[p.group];
    const bool rows = p.rule == SubspaceRule::rows, plain = p.rule == SubspaceRule::plain;
    const at::Tensor g = plain ? gradients[i] : inSubspace(gradients[i], p.axis, at::kDouble);
    auto& [m, v] = moments[i];
    m = rule.beta1 * m + (1 - rule.beta1) * g;
    v = rule.beta2 * v + (1 - rule.beta2) * (rows ? g.square().mean(0) : g.square());
    const double t1 = 1 - std::pow(rule.beta1, step), t2 = 1 - std::pow(rule.beta2, step);
    at::Tensor update = (m / t1) / ((v / t2).sqrt() + rule.eps);
    if (!plain && !rows) update = inSubspace(update, p.axis, at::kDouble);
    p.tensor.mul_(1 - rule.lr * rule.weight_decay).sub_(rule.lr * update);
  }
}

// The gradient of T_S has rows for the tokens of a batch: a few, of the first tile or of both; none; all but some.
TEST(SubspaceAdam, GradientsOfFewTokens) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    Trainee trainee(dtype), by_hand(at::kDouble);
    std::vector<std::pair<at::Tensor, at::Tensor>> moments;
    for (size_t i = 0; i < by_hand.parameters.size(); ++i) {
      trainee.parameters[i].tensor.copy_(by_hand.parameters[i].tensor);
      const at::Tensor zeros = at::zeros_like(by_hand.parameters[i].tensor);
      moments.emplace_back(zeros, by_hand.parameters[i].rule == SubspaceRule::rows ? zeros[0] : zeros);
    }
    const std::vector<std::vector<int64_t>> batches = {{3, 1, 4}, {0, kTokens - 1, 500}, {}, {kTokens}, {7}};
    for (size_t step = 0; step < batches.size(); ++step) {
      auto gradients = by_hand.gradients(static_cast<int64_t>(step));
      at::Tensor there = at::zeros({kTokens, 1}, at::kDouble);
      for (const int64_t token : batches[step])
        token < kTokens ? there[token].fill_(1) : there.narrow(0, 5, kTokens - 5).fill_(1);
      gradients[2].mul_(there);
      stepByHand(by_hand, moments, gradients, static_cast<int64_t>(step) + 1);
      for (at::Tensor& g : gradients)
        g = g.to(dtype);
      trainee.step(gradients);
    }
    for (size_t i = 0; i < trainee.parameters.size(); ++i) {
      const at::Tensor apart = trainee.parameters[i].tensor.to(at::kDouble) - by_hand.parameters[i].tensor;
      EXPECT_LT(apart.abs().max().item<double>(), dtype == at::kDouble ? 1e-12 : 1e-4) << trainee.parameters[i].name;
    }
  }
}

// In fp32, with gradients that lie anywhere, and without a projection of W_p2.
TEST(SubspaceAdam, WeightsStayInTheSubspace) {
  Trainee trainee(at::kFloat);
  trainee.train(0, 400);
  for (size_t i = 0; i < 4; ++i) {
    const at::Tensor w = trainee.parameters[i].tensor.to(at::kDouble);
    const at::Tensor off = w - inSubspace(w, trainee.parameters[i].axis, at::kDouble);
    EXPECT_LT((off.norm() / w.norm()).item<double>(), 2e-6) << trainee.parameters[i].name;
  }
}

TEST(SubspaceAdam, MomentsOfRowsAreSmall) {
  Trainee trainee(at::kFloat);
  const auto state = trainee.adam.state();
  EXPECT_EQ(state[1].at("exp_avg").sizes(), (std::vector<int64_t>{kRank, kUnits}));
  EXPECT_EQ(state[1].at("exp_avg_sq").sizes(), (std::vector<int64_t>{kUnits}));
  EXPECT_EQ(state[0].at("exp_avg_sq").sizes(), (std::vector<int64_t>{kWidth, kWidth}));
}

TEST(SubspaceAdam, WhatHasNoGradientStays) {
  Trainee trainee(at::kFloat);
  const std::vector<at::Tensor> before = trainee.all();
  const std::vector<at::Tensor> none(6);
  trainee.step(none);
  EXPECT_EQ(trainee.adam.squares(none), std::vector<double>(6));
  expectEqual(trainee.all(), before);
}

class SubspaceAdamTypes : public testing::TestWithParam<at::ScalarType> {};

TEST_P(SubspaceAdamTypes, StateGoesOnWithTheSameBits) {
  Trainee trainee(GetParam()), again(GetParam());
  trainee.train(0, 5);
  const auto state = test::copied(trainee.adam.state());
  for (size_t i = 0; i < 6; ++i)
    again.parameters[i].tensor.copy_(trainee.parameters[i].tensor);
  again.adam.load(state);
  expectEqual(again.all(), trainee.all());
  trainee.train(5, 9);
  again.train(5, 9);
  expectEqual(again.all(), trainee.all());
}

INSTANTIATE_TEST_SUITE_P(Types, SubspaceAdamTypes, testing::Values(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

// Of a tensor that is not contiguous, and of one that has no elements.
TEST(SubspaceAdam, Strides) {
  Trainee usual(at::kFloat), turned(at::kFloat);
  for (auto& p : turned.parameters) {
    if (p.tensor.dim() == 2) p.tensor = p.tensor.t().contiguous().t();
  }
  usual.train(0, 3);
  turned.train(0, 3);
  for (size_t i = 0; i < 6; ++i)
    EXPECT_TRUE(at::allclose(usual.parameters[i].tensor, turned.parameters[i].tensor, 1e-5, 1e-6));
  SubspaceAdam empty;
  const at::Tensor nothing = at::empty({0, kWidth});
  empty.add({{"none", nothing, 0, SubspaceRule::projected, 1, vectors(), kWidth}, {"void", at::empty({0}), 0}});
  empty.project({nothing.clone(), at::empty({0})});
  empty.form({nothing, at::empty({0})}, {nothing.clone(), at::empty({0})}, kRules);
}

template <typename Error>
void expectThrows(const std::function<void()>& call, const std::string& said) {
  EXPECT_TRUE(test::holds(test::thrownBy<Error>(call), {said}));
}

TEST(SubspaceAdam, Mistakes) {
  Trainee trainee(at::kFloat);
  const std::vector<at::Tensor> before = trainee.all();
  auto gradients = trainee.gradients(0);
  gradients.pop_back();
  expectThrows<ValueError>([&] { trainee.adam.project(gradients); }, "for each of 6 parameters, got 5");
  gradients.push_back(at::zeros({3}));
  expectThrows<ValueError>([&] { trainee.adam.project(gradients); },
                           "bias: expected a gradient of shape [200], got [3]");
  gradients[5] = at::zeros({kUnits}).to_sparse();
  expectThrows<TypeError>([&] { trainee.adam.project(gradients); }, "bias: expected a dense floating-point gradient");
  SubspaceAdam adam;
  SubspaceParameter p = trainee.parameters[0];
  p.vectors = vectors().narrow(1, 0, 5);
  expectThrows<ValueError>([&] { adam.add({p}); }, "out: vectors: expected shape [1 to 96, 96], got [8, 5]");
  p.vectors.reset();
  expectThrows<ValueError>([&] { adam.add({p}); }, "got none");
  p.vectors = vectors();
  p.is_coordinates = true;
  expectThrows<ValueError>([&] { adam.add({p}); }, "out: expected all 8 coordinates in dimension 0, got 96");
  p = trainee.parameters[1];
  p.axis = 1;
  expectThrows<ValueError>([&] { adam.add({p}); }, "down: axis: expected 0, or 1 of an embedding, got 1");
  expectThrows<TypeError>([&] { adam.add({{"ids", at::zeros({3}, at::kLong)}}); }, "ids: expected a dense floating");
  EXPECT_TRUE(adam.state().empty());
  auto state = trainee.adam.state();
  state[2].erase("exp_avg_sq");
  expectThrows<ValueError>([&] { trainee.adam.load(state); },
                           "embedding: expected 'exp_avg_sq' in the state, got none");
  state = trainee.adam.state();
  state[1]["exp_avg"] = at::zeros({kWidth, kUnits});
  expectThrows<ValueError>([&] { trainee.adam.load(state); }, "down: exp_avg: expected shape [8, 200], got [96, 200]");
  expectEqual(trainee.all(), before);
}

}  // namespace
}  // namespace lowcomm
