#include <array>
#include <cmath>

#include "base/error.h"
#include "collective/context.h"
#include "diloco/diloco_options.h"
#include "diloco_ranks.h"

namespace lowcomm {
namespace {

using namespace test;

// The state with which each rank ends one run.
struct TrainingResult {
  std::vector<std::vector<at::Tensor>> outer, parameters;
};

TrainingResult run(int size, const DiLoCoXOptions& o, int64_t steps) {
  Ranks ranks(size);
  TrainingResult trained{std::vector<std::vector<at::Tensor>>(size), std::vector<std::vector<at::Tensor>>(size)};
  onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Trainee trainee(rank, kShapes);
    trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, queue, o);
    trainee.train(0, steps);
    trained.outer[rank] = trainee.outer();
    for (const auto& p : trainee.parameters)
      trained.parameters[rank].push_back(p.tensor.clone());
  });
  return trained;
}

// The definition of every mode, in fp64 and in the paper's words, next to the loop's fused passes.
TEST(DiLoCoX, ModesAreWhatTheyAreDefinedAs) {
  constexpr int kRanks = 2, kEvery = 4, kSteps = 4 * 5 + 1;
  for (OuterMode mode : {OuterMode::sync, OuterMode::proceed, OuterMode::restart}) {
    const DiLoCoXOptions o = options(kEvery, mode);
    const TrainingResult ended = run(kRanks, o, kSteps);
    std::vector<Trainee> replicas;
    for (int rank = 0; rank < kRanks; ++rank)
      replicas.emplace_back(rank, kShapes);
    for (size_t i = 0; i < kShapes.size(); ++i) {
      at::Tensor outer = replicas[0].parameters[i].tensor.to(at::kDouble), u = at::zeros_like(outer);
      std::array<at::Tensor, kRanks> start = {outer, outer};
      at::Tensor average;  // Δ of the outer step before
      for (int step = 0; step < kSteps; ++step) {
        for (Trainee& replica : replicas)
          replica.parameters[i].tensor.sub_(replica.gradient(i, step) * 0.1);
        if ((step + 1) % kEvery != 0) continue;
        std::array<at::Tensor, kRanks> delta;
        for (int r = 0; r < kRanks; ++r)
          delta[r] = start[r] - replicas[r].parameters[i].tensor.to(at::kDouble);
        const at::Tensor mean = (delta[0] + delta[1]) / kRanks;
        if (const at::Tensor& g = mode == OuterMode::sync ? mean : average; g.defined()) {
          u = o.momentum * u + g;
          outer = outer - o.lr * (g + o.momentum * u);
        }
        for (int r = 0; r < kRanks; ++r) {
          if (mode == OuterMode::proceed) {
            start[r] = outer - delta[r];
          } else if (mode == OuterMode::sync || average.defined()) {
            start[r] = outer;
          } else {
            start[r] = start[r] - delta[r];  // restart's first: nothing to restart from yet
          }
          replicas[r].parameters[i].tensor.copy_(start[r]);
        }
        average = mean;
      }
      for (int r = 0; r < kRanks; ++r) {
        EXPECT_LE((ended.parameters[r][i] - replicas[r].parameters[i].tensor).abs().max().item<float>(), 2e-5)
            << outerModeName(mode) << " tensor " << i;
      }
      EXPECT_LE((ended.outer[0][i].to(at::kDouble) - outer).abs().max().item<double>(), 2e-5) << outerModeName(mode);
    }
  }
}

// θ̄ keeps what bf16 cannot hold: what rounding it to the parameters' dtype changes is no training.
TEST(DiLoCoX, RoundingOfTheParametersIsNoTraining) {
  for (OuterMode mode : {OuterMode::sync, OuterMode::proceed, OuterMode::restart}) {
    Ranks ranks(2);
    onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
      Trainee trainee(rank, {{40, 30}});
      at::Tensor& x = trainee.parameters[0].tensor;
      x = x.to(at::kBFloat16);
      DiLoCoXOptions o = options(1, mode);
      o.lr = 0.3;
      o.momentum = 0;
      trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, queue, o);
      x.add_(0.01);  // one inner step, then none that moves anything
      for (int step = 0; step < 4; ++step)
        trainee.loop->step();
      const at::Tensor settled = trainee.outer()[0];
      for (int step = 0; step < 6; ++step)
        trainee.loop->step();
      if (mode != OuterMode::proceed) {  // which goes on sending what it has trained and not averaged yet
        EXPECT_TRUE(at::equal(trainee.outer()[0], settled)) << outerModeName(mode);
      }
      EXPECT_GT((settled - settled.to(at::kBFloat16).to(at::kFloat)).abs().max().item<float>(), 0);
    });
  }
}

TEST(DiLoCoX, BuffersThatDifferAreNamed) {
  Ranks ranks(2);
  std::vector<std::string> errors(2);
  onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Trainee trainee(rank, {{20, 10}});
    const at::Tensor unlike = at::full({5}, static_cast<float>(rank));
    errors[rank] = test::thrownBy<PeerRefusal>(
        [&] { DiLoCoX(trainee.parameters, queue, options(2, OuterMode::sync), nullptr, {{"mean", unlike}}); });
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("broadcast) differs"), std::string::npos) << error;
}

TEST(DiLoCoX, ManyRanksManyDtypes) {
  Ranks ranks(3);
  std::vector<std::vector<at::Tensor>> outer(3);
  onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Trainee trainee(rank, kShapes);
    trainee.parameters[0].tensor = trainee.parameters[0].tensor.to(at::kBFloat16);
    trainee.parameters[1].tensor = trainee.parameters[1].tensor.to(at::kHalf);
    trainee.parameters[2].tensor = trainee.parameters[2].tensor.transpose(0, 2);  // not contiguous
    trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, queue,
                                             coded(options(2, OuterMode::proceed), "sym4:bucket=64", 2));
    for (int64_t step = 0; step < 9; ++step) {
      for (size_t i = 0; i < trainee.parameters.size(); ++i) {
        at::Tensor& x = trainee.parameters[i].tensor;
        x.sub_((Trainee::noise(x.sizes(), step * 10 + i + 100 * rank) * 0.1).to(x.scalar_type()));
      }
      trainee.loop->step();
    }
    trainee.loop->finish();
    outer[rank] = trainee.outer();
    for (size_t i = 0; i < outer[rank].size(); ++i) {
      const at::Tensor& x = trainee.parameters[i].tensor;
      EXPECT_TRUE(at::equal(x, outer[rank][i].to(x.scalar_type())));
    }
  });
  expectEqual(outer[1], outer[0]);
  expectEqual(outer[2], outer[0]);
}

}  // namespace
}  // namespace lowcomm
