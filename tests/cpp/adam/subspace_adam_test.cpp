#include "adam/subspace_adam.h"

#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

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

  explicit Trainee(at::ScalarType dtype, SubspaceRule of_down = SubspaceRule::rows) {
    const at::Tensor u = vectors();
    const auto weight = [&](const char* name, at::IntArrayRef shape, SubspaceRule rule, int64_t axis) {
      const at::Tensor w = inSubspace(noise(shape, parameters.size(), at::kDouble), axis, dtype);
      parameters.push_back({name, w, parameters.size() % 2, rule, axis, u, kWidth});
    };
    weight("out", {kWidth, kWidth}, SubspaceRule::projected, 0);
    weight("down", {kWidth, kUnits}, of_down, 0);
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

  void step(const std::vector<at::Tensor>& gradients, double scale = 1) {
    for (const at::Tensor& slice : adam.project(gradients))
      EXPECT_FALSE(slice.defined());
    for (const at::Tensor& slice : adam.form(tensors(), gradients, kRules, scale))
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

class SubspaceAdamRules : public testing::TestWithParam<SubspaceRule> {};

TEST_P(SubspaceAdamRules, FollowTheFormulas) {
  Trainee trainee(at::kDouble, GetParam()), by_hand(at::kDouble, GetParam());
  std::vector<std::pair<at::Tensor, at::Tensor>> moments;
  for (const auto& p : by_hand.parameters) {
    const at::Tensor zeros = at::zeros_like(p.tensor);
    moments.emplace_back(zeros, p.rule == SubspaceRule::rows ? zeros[0] : zeros);
  }
  for (int64_t step = 1; step <= 12; ++step) {
    trainee.step(trainee.gradients(step));
    stepByHand(by_hand, moments, by_hand.gradients(step), step);
  }
  for (size_t i = 0; i < trainee.parameters.size(); ++i) {
    EXPECT_LT((trainee.parameters[i].tensor - by_hand.parameters[i].tensor).abs().max().item<double>(), 1e-12)
        << trainee.parameters[i].name;
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, SubspaceAdamRules, testing::Values(SubspaceRule::rows, SubspaceRule::projected),
                         [](const auto& info) {
                           return std::string(info.param == SubspaceRule::rows ? "rows" : "projected");
                         });

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

// The norm of a projected gradient is that of its coordinates; a scale acts on all gradients.
TEST(SubspaceAdam, SquaresAndScale) {
  Trainee trainee(at::kDouble), scaled(at::kDouble);
  auto gradients = trainee.gradients(0);
  gradients[4].reset();
  trainee.adam.project(gradients);
  const std::vector<double> squares = trainee.adam.squares(gradients);
  for (size_t i = 0; i < 6; ++i) {
    const SubspaceParameter& p = trainee.parameters[i];
    if (i == 4) {
      EXPECT_EQ(squares[i], 0);
      continue;
    }
    const at::Tensor g = i < 4 ? inSubspace(gradients[i], p.axis, at::kDouble) : gradients[i];
    const double expected = g.square().sum().item<double>();
    EXPECT_NEAR(squares[i], expected, 1e-13 * expected) << p.name;
  }
  auto half = trainee.gradients(0);
  for (auto& g : half)
    g = g * 0.5;
  trainee.step(half);
  scaled.step(scaled.gradients(0), 0.5);
  for (size_t i = 0; i < 6; ++i) {
    const at::Tensor apart = trainee.parameters[i].tensor - scaled.parameters[i].tensor;
    EXPECT_LT(apart.abs().max().item<double>(), 1e-14) << trainee.parameters[i].name;
  }
}

TEST(SubspaceAdam, WhatHasNoGradientStays) {
  Trainee trainee(at::kFloat);
  const std::vector<at::Tensor> before = trainee.all();
  trainee.step(std::vector<at::Tensor>(6));
  expectEqual(trainee.all(), before);
}

// The parts of W_p1 and W_p2 in two processes, whose sums the caller makes.
TEST(SubspaceAdam, SlicesAreTheWhole) {
  Trainee whole(at::kDouble);
  const int64_t cut = 37;
  const auto part = [&](const at::Tensor& t, int p) {
    return p == 0 ? t.narrow(0, 0, cut) : t.narrow(0, cut, kWidth - cut);
  };
  const at::Tensor u = vectors().t();
  std::vector<SubspaceAdam> parts(2);
  std::vector<std::vector<at::Tensor>> tensors(2);
  for (int p = 0; p < 2; ++p) {
    for (size_t i = 0; i < 2; ++i) {
      SubspaceParameter own = whole.parameters[i];
      own.tensor = part(own.tensor, p).clone();
      own.vectors = part(u, p).t();
      own.is_slice = true;
      tensors[p].push_back(own.tensor);
      parts[p].add({own});
    }
  }
  const auto sum = [](const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_EQ(a[i].defined(), b[i].defined());
      if (!a[i].defined()) continue;
      a[i].add_(b[i]);
      b[i].copy_(a[i]);
    }
  };
  for (int64_t step = 0; step < 5; ++step) {
    const auto gradients = whole.gradients(step);
    std::vector<std::vector<at::Tensor>> own(2);
    for (int p = 0; p < 2; ++p)
      own[p] = {part(gradients[0], p), part(gradients[1], p)};
    sum(parts[0].project(own[0]), parts[1].project(own[1]));
    const auto first = parts[0].form(tensors[0], own[0], kRules), second = parts[1].form(tensors[1], own[1], kRules);
    EXPECT_TRUE(first[0].defined());
    EXPECT_FALSE(first[1].defined());  // W_p2's update needs no sum
    sum(first, second);
    for (int p = 0; p < 2; ++p)
      parts[p].apply(tensors[p], kRules);
    whole.step(gradients);
  }
  for (size_t i = 0; i < 2; ++i) {
    const at::Tensor together = at::cat({tensors[0][i], tensors[1][i]});
    EXPECT_LT((together - whole.parameters[i].tensor).abs().max().item<double>(), 1e-13);
  }
}

// A weight and the coordinates of one take the same steps.
TEST_P(SubspaceAdamRules, CoordinatesAreTheWeight) {
  Trainee trainee(at::kDouble, GetParam());
  SubspaceAdam of_coordinates;
  const at::Tensor u = vectors();
  const auto coordinates = [&](size_t i, const at::Tensor& w) {
    return trainee.parameters[i].axis == 0 ? u.mm(w) : w.mm(u.t());
  };
  std::vector<at::Tensor> z;
  for (size_t i = 0; i < 3; ++i) {
    SubspaceParameter p = trainee.parameters[i];
    p.tensor = coordinates(i, p.tensor);
    p.is_coordinates = true;
    z.push_back(p.tensor);
    of_coordinates.add({p});
  }
  for (int64_t step = 0; step < 10; ++step) {
    const auto gradients = trainee.gradients(step);
    std::vector<at::Tensor> of_z;
    for (size_t i = 0; i < 3; ++i)
      of_z.push_back(coordinates(i, gradients[i]));
    const at::Tensor kept = of_z[1].clone();
    of_coordinates.project(of_z);
    of_coordinates.form(z, of_z, kRules, 0.5);
    EXPECT_TRUE(at::equal(of_z[1], kept));
    trainee.step(gradients, 0.5);
  }
  for (size_t i = 0; i < 3; ++i) {
    const at::Tensor w = trainee.parameters[i].axis == 0 ? u.t().mm(z[i]) : z[i].mm(u);
    EXPECT_LT((w - trainee.parameters[i].tensor).abs().max().item<double>(), 1e-12) << trainee.parameters[i].name;
  }
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
  expectThrows<ValueError>([&] { trainee.adam.setVectors(std::vector<at::Tensor>(6)); },
                           "out: vectors: expected shape");
  expectEqual(trainee.all(), before);
}

}  // namespace
}  // namespace lowcomm
