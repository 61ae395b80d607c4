#include "adam/quantized_adam.h"

#include <cmath>

#include "base/error.h"
#include "collective/op_context.h"
#include "diloco/diloco_ranks.h"

namespace lowcomm {
namespace {

using namespace test;

const std::vector<AdamRule> kRules = {{0.01, 0.9, 0.99, 1e-8, 0.1}, {0.002, 0.8, 0.98, 1e-6, 0}};

QuantizedAdamOptions options(const std::string& codec, int64_t warmup_steps) {
  QuantizedAdamOptions o;
  o.codec = CodecSpec::parse(codec);
  o.warmup_steps = warmup_steps;
  return o;
}

// One rank's parameters, in two groups, and gradients that are the same in every run.
struct Trainee {
  std::vector<AdamParameter> parameters;
  std::unique_ptr<QuantizedAdam> adam;
  int rank;

  Trainee(int rank, const std::shared_ptr<OpQueue>& queue, const QuantizedAdamOptions& o,
          at::ScalarType dtype = at::kFloat)
      : adam(std::make_unique<QuantizedAdam>(queue, o)), rank(rank) {
    for (size_t i = 0; i < kShapes.size(); ++i)
      parameters.push_back({"p" + std::to_string(i), noise(kShapes[i], i).to(dtype), i % 2});
    adam->add(parameters);
  }

  static at::Tensor noise(at::IntArrayRef shape, uint64_t seed) {
    return at::randn(shape, at::detail::createCPUGenerator(1 + seed), at::kFloat);
  }

  // Of about the same scale within a tensor except for one column, which is a thousandth of it.
  static at::Tensor gradient(size_t i, int64_t step, int rank) {
    at::Tensor g = noise(kShapes[i], 1000 + 1000 * step + 10 * i + rank) + noise(kShapes[i], 100 + i);
    g.select(-1, 0).mul_(1e-3);
    return g;
  }

  std::vector<at::Tensor> gradients(int64_t step) const {
    std::vector<at::Tensor> all;
    for (size_t i = 0; i < kShapes.size(); ++i)
      all.push_back(gradient(i, step, rank));
    return all;
  }

  void train(int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step)
      adam->step(gradients(step), kRules);
  }

  // Copies of parameters and state, except for the residuals, which are each rank's own.
  std::vector<at::Tensor> shared() const {
    std::vector<at::Tensor> all;
    for (const AdamParameter& p : parameters)
      all.push_back(p.tensor.clone());
    for (const auto& state : adam->state()) {
      for (const auto& [key, tensor] : state) {
        if (key != "residual") all.push_back(tensor.clone());
      }
    }
    return all;
  }
};

// After it: Σ sent + Σ residuals = Σ of what the ranks' rule forms, v stays, and all ranks have the same bits.
TEST(QuantizedAdam, LosesNothing) {
  constexpr int kRanks = 3, kWarm = 4, kSteps = 12;
  for (const std::string codec : {"sym4:bucket=512", "gauss2", "qsgd4:bucket=128"}) {
    Ranks ranks(kRanks);
    std::vector<std::vector<at::Tensor>> ended(kRanks);
    std::vector<std::vector<std::vector<QuantizedAdam::State>>> states(
        kSteps, std::vector<std::vector<QuantizedAdam::State>>(kRanks));
    onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
      Trainee trainee(rank, queue, options(codec, kWarm));
      for (int step = 0; step < kSteps; ++step) {
        trainee.train(step, step + 1);
        states[step][rank] = copied(trainee.adam->state());
      }
      ended[rank] = trainee.shared();
    });
    for (int rank = 1; rank < kRanks; ++rank)
      expectEqual(ended[rank], ended[0]);
    for (int step = kWarm; step < kSteps; ++step) {
      for (size_t i = 0; i < kShapes.size(); ++i) {
        const AdamRule& rule = kRules[i % 2];
        const auto of = [&](int at, int rank, const char* key) { return states[at][rank][i].at(key).to(at::kDouble); };
        EXPECT_TRUE(at::equal(of(step, 0, "exp_avg_sq"), of(kWarm - 1, 0, "exp_avg_sq")));
        const at::Tensor v = of(step, 0, "exp_avg_sq") / (1 - std::pow(rule.beta2, kWarm));
        const at::Tensor denominator = v.clamp_min((v.mean() * (1 - rule.beta2)).item<double>()).sqrt() + rule.eps;
        at::Tensor formed = at::zeros_like(v), left = at::zeros_like(v);
        for (int r = 0; r < kRanks; ++r) {
          formed += (rule.beta1 * of(step - 1, 0, "exp_avg") +
                     (1 - rule.beta1) * Trainee::gradient(i, step, r).to(at::kDouble)) /
                    denominator;
          left += of(step, r, "residual") - of(step - 1, r, "residual");
        }
        const at::Tensor sent = of(step, 0, "exp_avg") / denominator * kRanks;
        EXPECT_LE((sent + left - formed).abs().max().item<double>(), 1e-4) << codec << " tensor " << i;
        EXPECT_GT(of(step, 0, "residual").abs().max().item<double>(), 0) << codec << " tensor " << i;
      }
    }
  }
}

// A parameter whose gradient is 0 in the warm-up has a v of 0: the first that is not moves it no further than others.
TEST(QuantizedAdam, AParameterThatTheWarmUpHasNotMovedIsBounded) {
  Ranks ranks(2);
  onRanks(ranks, [&](int, const std::shared_ptr<OpQueue>& queue) {
    const at::Tensor x = at::zeros({1024});
    QuantizedAdam adam(queue, options("gauss4", 20));
    adam.add({{"x", x, 0}});
    const at::Tensor seen = at::ones({1024});
    seen.narrow(0, 0, 8).zero_();
    for (int step = 0; step < 24; ++step)
      adam.step({seen}, {AdamRule{}});
    EXPECT_LE(x.narrow(0, 0, 8).abs().max().item<float>(), 0.1f * x.abs().max().item<float>());
    const at::Tensor before = x.clone();
    adam.step({at::ones({1024})}, {AdamRule{}});
    EXPECT_LE((x - before).abs().max().item<float>(), 5e-3f);  // Adam's own bound here: lr·(1−β1)/√(1−β2) = 3.2e-3
  });
}

// What rounding to bf16 takes comes back: the sum of both is the fp32 run's parameter, to the bit.
TEST(QuantizedAdam, RoundingOfTheParametersLosesNothing) {
  std::vector<at::Tensor> wide, whole;
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Ranks ranks(2);
    onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
      Trainee trainee(rank, queue, options("sym4:bucket=512", 4), dtype);
      for (size_t i = 0; i < kShapes.size(); ++i)
        trainee.parameters[i].tensor.copy_(Trainee::noise(kShapes[i], i).to(at::kBFloat16));
      trainee.train(0, 9);
      if (rank != 0) return;
      const auto states = trainee.adam->state();
      for (size_t i = 0; i < kShapes.size(); ++i) {
        const at::Tensor x = trainee.parameters[i].tensor.to(at::kFloat);
        dtype == at::kFloat ? wide.push_back(x.clone()) : whole.push_back(x + states[i].at("rounding"));
      }
    });
  }
  expectEqual(whole, wide);
}

TEST(QuantizedAdam, ParametersThatDifferAreNamed) {
  const auto said = [](const std::function<at::Tensor(int rank)>& make) {
    Ranks ranks(2);
    std::vector<std::string> errors(2);
    onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
      const at::Tensor x = make(rank);
      QuantizedAdam adam(queue, options("sym4", 2));
      adam.add({{"x", x, 0}});
      errors[rank] = test::thrownBy<PeerRefusal>([&] { adam.step({at::ones_like(x)}, {AdamRule{}}); });
    });
    return errors[0];
  };
  EXPECT_TRUE(holds(said([](int rank) { return at::ones({600 + rank}); }), {"parameters"}));
  EXPECT_TRUE(holds(said([](int rank) { return at::full({600}, static_cast<float>(rank)); }), {"checksum"}));
}

}  // namespace
}  // namespace lowcomm
