// An outer loop with a quorum: a late site's work counts once, and contributions count by samples.
#include "base/error.h"
#include "collective/context.h"
#include "diloco_ranks.h"

namespace lowcomm::test {
namespace {

Ranks group(int size, uint32_t epoch) {
  return Ranks(size, [epoch](int, GroupConfig& config) { config.epoch = epoch; });
}

std::vector<at::Tensor> parametersOf(const Trainee& trainee) {
  std::vector<at::Tensor> all;
  for (const OuterParameter& p : trainee.parameters)
    all.push_back(p.tensor.clone());
  return all;
}

std::vector<std::unique_ptr<Trainee>> some(int size) {
  std::vector<std::unique_ptr<Trainee>> trainees;
  for (int rank = 0; rank < size; ++rank)
    trainees.push_back(std::make_unique<Trainee>(rank, kShapes));
  return trainees;
}

// Two ranks go on without the third, which has trained for two steps since the last outer step, and let it in again.
TEST(DiLoCoXQuorum, ALateSiteKeepsItsWork) {
  for (const int64_t fragments : {1, 2}) {
    DiLoCoXOptions o = options(4, OuterMode::sync);
    o.fragments = fragments;
    o.quorum = 2;
    Ranks all = group(3, 1), quorum = group(2, 2), again = group(3, 3);
    const auto trainees = some(3);
    onRanks(all, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
      Trainee& trainee = *trainees[rank];
      trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, queue, o);
      trainee.train(0, 5);
    });
    const auto theirs = parametersOf(*trainees[2]), from = trainees[2]->outer();
    onRanks(quorum, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
      Trainee& trainee = *trainees[rank];
      if (rank == 0) all.hub().kill(2);
      const auto step = [&] { trainee.train(trainee.loop->steps(), trainee.loop->steps() + 1); };
      EXPECT_THROW(
          {
            while (true)
              step();
          },
          PeerError);
      trainee.loop->regroup({queue});
      const int64_t begun = trainee.loop->report().outer_steps;
      step();  // takes the outer step that the third rank is late for
      EXPECT_EQ(trainee.loop->report().outer_steps, begun + 1);
      while (trainee.loop->steps() < 12)
        step();
      EXPECT_EQ(trainee.loop->report().late_samples, 0);
    });
    onRanks(again, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
      Trainee& trainee = *trainees[rank];
      trainee.loop->regroup({queue});
      if (rank == 2) {
        const auto now = parametersOf(trainee), outer = trainee.outer();
        for (size_t i = 0; i < now.size(); ++i)
          EXPECT_TRUE(at::equal(now[i], outer[i] - (from[i] - theirs[i]))) << fragments << " fragments, tensor " << i;
        EXPECT_GT(trainee.loop->report().late_samples, 0);
        EXPECT_EQ(trainee.loop->report().dropped_samples, 0);
      }
      trainee.trainUntil(24);
      trainee.loop->finish();
    });
    for (size_t i = 0; i < kShapes.size(); ++i)
      EXPECT_TRUE(at::equal(trainees[0]->outer()[i], trainees[2]->outer()[i]));
  }
}

// The others have applied an average that the late rank's message is part of: it would count twice.
TEST(DiLoCoXQuorum, WorkInAnAverageCountsOnce) {
  DiLoCoXOptions o = options(4, OuterMode::proceed);
  o.quorum = 2;
  Ranks all = group(3, 1), again = group(3, 2);
  const auto trainees = some(3);
  onRanks(all, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Trainee& trainee = *trainees[rank];
    trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, queue, o);
    trainee.train(0, rank == 2 ? 7 : 8);  // at 8 the average of 4 is applied
  });
  onRanks(again, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    if (rank == 2) all.hub().kill(2);  // the others' next average does not come
    trainees[rank]->loop->regroup({queue});
    if (rank < 2) return;
    const auto now = parametersOf(*trainees[2]), outer = trainees[2]->outer();
    for (size_t i = 0; i < now.size(); ++i)
      EXPECT_TRUE(at::equal(now[i], outer[i]));
    EXPECT_EQ(trainees[2]->loop->report().late_samples, 0);
    EXPECT_EQ(trainees[2]->loop->report().dropped_samples, 7);
  });
}

// Two ranks are without an average that the others have applied. The first that takes over does not know how their
// group ended for the others, and cannot say that the second one's work is in none.
TEST(DiLoCoXQuorum, WhoTookOverAnswersForNobody) {
  DiLoCoXOptions o = options(4, OuterMode::proceed);
  o.quorum = 2;
  Ranks all = group(4, 1), two = group(2, 2), three = group(3, 3), again = group(4, 4);
  const auto trainees = some(4);
  onRanks(all, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    trainees[rank]->loop = std::make_unique<DiLoCoX>(trainees[rank]->parameters, queue, o);
    trainees[rank]->train(0, rank < 2 ? 8 : 7);  // at 8 the average of 4 is applied
  });
  all.hub().kill(2);
  all.hub().kill(3);
  onRanks(two, [&](int rank, const std::shared_ptr<OpQueue>& queue) { trainees[rank]->loop->regroup({queue}); });
  onRanks(three, [&](int rank, const std::shared_ptr<OpQueue>& queue) { trainees[rank]->loop->regroup({queue}); });
  onRanks(again, [&](int rank, const std::shared_ptr<OpQueue>& queue) { trainees[rank]->loop->regroup({queue}); });
  for (int rank : {2, 3}) {
    EXPECT_EQ(trainees[rank]->loop->report().dropped_samples, 7) << rank;
    EXPECT_EQ(trainees[rank]->loop->report().late_samples, 0) << rank;
  }
}

// finish() in the next group takes an outer step of what the ended group's message has not carried.
TEST(DiLoCoXQuorum, TheEndAveragesWhatALostMessageHeld) {
  DiLoCoXOptions o = options(4, OuterMode::proceed);
  o.quorum = 2;
  Ranks all = group(3, 1), two = group(2, 2);
  onRanks(all, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Trainee trainee(rank, kShapes);
    trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, queue, o);
    trainee.train(0, rank == 2 ? 3 : 4);
    if (rank == 2) return all.hub().kill(2);
    const auto before = trainee.outer();
    EXPECT_THROW(trainee.loop->finish(), PeerError);
    trainee.loop->regroup({std::make_shared<EngineQueue>(two.engine(rank))});
    trainee.loop->finish(/*sends=*/true);
    for (size_t i = 0; i < before.size(); ++i)
      EXPECT_FALSE(at::equal(trainee.outer()[i], before[i]));
  });
}

// A late rank's averaged buffers become the others', and a group that breaks off before it takes over costs no work.
TEST(DiLoCoXQuorum, BuffersAreTheOthersAndAFailedReturnCostsNothing) {
  DiLoCoXOptions o = options(4, OuterMode::sync);
  o.quorum = 2;
  Ranks all = group(3, 1), two = group(2, 2), broken = group(3, 3), again = group(3, 4);
  const auto trainees = some(3);
  std::vector<at::Tensor> variances;
  for (int rank = 0; rank < 3; ++rank)
    variances.push_back(at::full({5}, 1.0));
  onRanks(all, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Trainee& trainee = *trainees[rank];
    std::vector<OuterParameter> buffers{{"variance", variances[rank]}};
    trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, queue, o, nullptr, std::move(buffers));
    trainee.train(0, 6);
  });
  variances[2].fill_(0.3);
  all.hub().kill(2);
  onRanks(two, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    trainees[rank]->loop->regroup({queue});
    variances[rank].fill_(0.1);
    trainees[rank]->train(6, 10);
  });
  broken.hub().kill(0);
  onRanks(broken, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    EXPECT_THROW(trainees[rank]->loop->regroup({queue}), PeerError);
  });
  onRanks(again, [&](int rank, const std::shared_ptr<OpQueue>& queue) { trainees[rank]->loop->regroup({queue}); });
  EXPECT_TRUE(at::allclose(variances[2], at::full({5}, 0.1)));
  EXPECT_EQ(trainees[2]->loop->report().late_samples, 2);
  EXPECT_EQ(trainees[2]->loop->report().dropped_samples, 0);
}

// c²/n of c samples in n steps: 4²/4 and 8²/4.
TEST(DiLoCoXQuorum, ContributionsCountBySamples) {
  DiLoCoXOptions o = options(4, OuterMode::sync);
  o.quorum = 1;
  o.lr = 1;
  o.momentum = 0;
  Ranks both(2);
  std::vector<std::vector<at::Tensor>> trained(2), outer(2);
  onRanks(both, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Trainee trainee(rank, kShapes);
    trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, queue, o);
    for (int64_t step = 0; step < 4; ++step) {
      trainee.inner(step);
      if (step == 3) trained[rank] = parametersOf(trainee);
      trainee.loop->step(1 + rank);
    }
    EXPECT_EQ(trainee.loop->place().begun, 1);
    EXPECT_EQ(trainee.loop->place().awaited, 0);
    outer[rank] = trainee.outer();
  });
  for (size_t i = 0; i < kShapes.size(); ++i) {
    EXPECT_TRUE(at::allclose(outer[0][i], trained[0][i] * .2 + trained[1][i] * .8, 1e-5, 1e-5));
    EXPECT_TRUE(at::equal(outer[0][i], outer[1][i]));
  }
}

}  // namespace
}  // namespace lowcomm::test
