// An outer loop goes on in another group: with what was lost, and with a newcomer, who takes the outer state over.
#include <atomic>
#include <functional>
#include <future>
#include <span>
#include <thread>

#include "base/error.h"
#include "collective/context.h"
#include "diloco_ranks.h"

namespace lowcomm::test {
namespace {

// A rank is lost in one group; the others go on in another, which a new rank joins.
TEST(DiLoCoXRegroup, GoesOnInAnotherGroup) {
  for (OuterMode mode : {OuterMode::sync, OuterMode::proceed}) {
    DiLoCoXOptions o = coded(options(3, mode), "sym4:bucket=64", 3);
    o.adapt_rank = true;
    Ranks before(3, [](int, GroupConfig& config) { config.timeout = std::chrono::seconds(2); }), after(3);
    std::vector<std::vector<at::Tensor>> outer(3);
    std::vector<int64_t> applied(3);
    onRanks(before, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
      Trainee trainee(rank, kShapes);
      const auto again = std::make_shared<EngineQueue>(after.engine(rank));
      if (rank == 2) {
        {
          Trainee lost(rank, kShapes);
          lost.loop = std::make_unique<DiLoCoX>(lost.parameters, queue, o);
          lost.train(0, 13);
          before.hub().kill(2);
        }
        // A newcomer has a model of its own and no history.
        trainee.parameters[0].tensor.add_(1);
        trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, nullptr, o);
        EXPECT_TRUE(holds(thrownBy<ValueError>([&] { trainee.loop->step(); }), {"expected a group", "regroup"}));
        trainee.loop->regroup({again});
      } else {
        trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, queue, o);
        const std::string error = thrownBy<PeerError>([&] { trainee.train(0, 60); });
        EXPECT_TRUE(holds(error, {"outer_step"}));
        const auto kept = trainee.outer();
        trainee.loop->regroup({again});
      }
      const int64_t begun = trainee.loop->report().outer_steps;
      while (trainee.loop->report().outer_steps < begun + 10)
        trainee.trainUntil(trainee.loop->steps() + 1);
      trainee.loop->finish();
      outer[rank] = trainee.outer();
      applied[rank] = trainee.loop->report().outer_steps;
      EXPECT_EQ(trainee.loop->report().participating, 3);
    });
    for (int rank : {1, 2}) {
      for (size_t i = 0; i < outer[0].size(); ++i)
        EXPECT_TRUE(at::equal(outer[rank][i], outer[0][i])) << outerModeName(mode) << " rank " << rank;
      EXPECT_EQ(applied[rank], applied[0]);
    }
  }
}

// A newcomer is lost in the middle of taking the state over: it has what it had, and takes it in the next group.
TEST(DiLoCoXRegroup, ATakeoverThatBreaksOffChangesNothing) {
  const std::vector<std::vector<int64_t>> large = {{512, 640}, {100000}};
  Ranks first(1), broken(2, [](int, GroupConfig& config) { config.timeout = std::chrono::seconds(2); }), again(2);
  std::vector<at::Tensor> before;
  Trainee veteran(0, large), newcomer(1, large);
  for (const OuterParameter& p : newcomer.parameters)
    p.tensor.fill_(9);
  veteran.loop = std::make_unique<DiLoCoX>(veteran.parameters, std::make_shared<EngineQueue>(first.engine(0)),
                                           options(2, OuterMode::sync));
  veteran.train(0, 6);
  before = veteran.outer();
  newcomer.loop = std::make_unique<DiLoCoX>(newcomer.parameters, nullptr, options(2, OuterMode::sync));
  const auto own = newcomer.outer();
  std::atomic<int> frames{0};
  std::promise<void> reached;
  broken.hub().tamper([&](int, int, Lane lane, std::span<std::byte>) {
    if (lane == Lane::bulk && ++frames == 12) reached.set_value();
  });
  auto killer = std::async(std::launch::async, [&, due = reached.get_future()] {
    if (due.wait_for(std::chrono::seconds(20)) == std::future_status::ready) broken.hub().kill(1);
  });
  Trainee* both[] = {&newcomer, &veteran};  // the newcomer has the lower rank
  onRanks(broken, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    EXPECT_THROW(
        {
          both[rank]->loop->regroup({queue});
          both[rank]->train(6, 9);  // the veteran goes on training, and is told at its outer step
        },
        PeerError)
        << rank;
  });
  killer.wait();
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(at::equal(veteran.outer()[i], before[i]));
    EXPECT_TRUE(at::equal(newcomer.outer()[i], own[i]));
  }
  EXPECT_EQ(newcomer.loop->steps(), 0);
  EXPECT_EQ(newcomer.loop->report().outer_steps, 0);
  onRanks(again, [&](int rank, const std::shared_ptr<OpQueue>& queue) { both[rank]->loop->regroup({queue}); });
  for (const Trainee* trainee : both) {
    const auto outer = trainee->outer();
    for (size_t i = 0; i < outer.size(); ++i)
      EXPECT_TRUE(at::equal(outer[i], before[i]));
  }
}

const std::string kTakeover = "DiLoCoX: take over the outer state";

// A site takes over all of its stripes or none: one of them comes, and the other one's link is lost.
TEST(DiLoCoXRegroup, ASiteTakesOverAllStripesOrNone) {
  const auto briefly = [](int, GroupConfig& config) { config.timeout = std::chrono::seconds(2); };
  Ranks sites[2] = {Ranks(2), Ranks(2)}, alone[2] = {Ranks(1), Ranks(1)};
  Ranks broken[2] = {Ranks(2, briefly), Ranks(2, briefly)}, again[2] = {Ranks(2), Ranks(2)};
  std::vector<std::unique_ptr<Trainee>> veterans(2), newcomers(2);
  const auto both = [&](const std::function<void(int site, int rank)>& f) {
    auto others = std::async(
        std::launch::async, [&] { onRanks(sites[1], [&](int rank, const std::shared_ptr<OpQueue>&) { f(1, rank); }); });
    onRanks(sites[0], [&](int rank, const std::shared_ptr<OpQueue>&) { f(0, rank); });
    others.get();
  };
  std::vector<at::Tensor> own[2];
  both([&](int site, int rank) {
    auto& trainee = (site == 0 ? veterans : newcomers)[rank];
    trainee = std::make_unique<Trainee>(site, kShapes);
    const OuterSite of{std::make_shared<EngineQueue>(sites[site].engine(rank)), {0, 0}, {2}};
    std::vector<std::shared_ptr<OpQueue>> groups;
    if (site == 0) groups.push_back(std::make_shared<EngineQueue>(alone[rank].engine(0)));
    trainee->loop = std::make_unique<DiLoCoX>(trainee->parameters, groups, options(2, OuterMode::sync), of);
    if (site == 0) trainee->train(0, 6);
    if (site == 1) own[rank] = trainee->outer();
  });
  both([&](int site, int rank) {
    const auto cut = [&](const std::string& op) {
      if (op == kTakeover && rank == 1) broken[1].hub().kill(1);
    };
    Engine& engine = broken[rank].engine(site);
    const auto queue = site == 0 ? std::make_shared<EngineQueue>(engine) : std::make_shared<HeldQueue>(engine, cut);
    Trainee& trainee = *(site == 0 ? veterans : newcomers)[rank];
    EXPECT_THROW(
        {
          trainee.loop->regroup({queue});
          trainee.train(6, 8);
        },
        PeerError)
        << "site " << site << " rank " << rank;
    if (site == 0) return;
    EXPECT_EQ(trainee.loop->steps(), 0);
    for (size_t i = 0; i < own[rank].size(); ++i)
      EXPECT_TRUE(at::equal(trainee.outer()[i], own[rank][i])) << "rank " << rank;
  });
  both([&](int site, int rank) {
    (site == 0 ? veterans : newcomers)[rank]->loop->regroup({std::make_shared<EngineQueue>(again[rank].engine(site))});
  });
  for (int rank : {0, 1}) {
    EXPECT_EQ(newcomers[rank]->loop->report().outer_steps, veterans[rank]->loop->report().outer_steps);
    for (size_t i = 0; i < own[rank].size(); ++i)
      EXPECT_TRUE(at::equal(newcomers[rank]->outer()[i], veterans[rank]->outer()[i])) << "rank " << rank;
  }
}

// The others make all inner steps of an interval meanwhile, and the newcomer does not make all of them afterwards.
TEST(DiLoCoXRegroup, OthersTrainWhileANewcomerTakesOver) {
  constexpr int64_t kEvery = 50;
  for (const int64_t fragments : {1, 2}) {
    DiLoCoXOptions o = options(kEvery, OuterMode::sync);
    o.fragments = fragments;
    Ranks before(2), after(3);
    std::promise<void> trained[2];
    std::vector<std::vector<at::Tensor>> outer(3);
    std::promise<void> release;
    const std::shared_future<void> released = release.get_future().share();
    auto releaser = std::async(std::launch::async, [&] {
      for (std::promise<void>& one : trained)
        one.get_future().wait_for(std::chrono::seconds(20));
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // many inner steps, however long one takes here
      release.set_value();
    });
    Trainee newcomer(2, kShapes);
    newcomer.parameters[0].tensor.add_(1);
    newcomer.loop = std::make_unique<DiLoCoX>(newcomer.parameters, nullptr, o);
    std::vector<std::unique_ptr<Trainee>> veterans;
    for (int rank : {0, 1})
      veterans.push_back(std::make_unique<Trainee>(rank, kShapes));
    onRanks(before, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
      veterans[rank]->loop = std::make_unique<DiLoCoX>(veterans[rank]->parameters, queue, o);
      veterans[rank]->train(0, kEvery);
      veterans[rank]->loop->quiesce();
    });
    const int64_t first = kEvery / fragments;  // to the next outer step
    onRanks(after, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
      if (rank == 2) {
        const auto hold = [&](const std::string& op) {
          if (op == kTakeover) released.wait_for(std::chrono::seconds(20));
        };
        newcomer.loop->regroup({std::make_shared<HeldQueue>(after.engine(2), hold)});
        EXPECT_GT(newcomer.loop->steps(), kEvery);
        EXPECT_LT(newcomer.loop->steps(), kEvery + first);
        newcomer.trainUntil(2 * kEvery);
        newcomer.loop->finish();
        outer[2] = newcomer.outer();
        return;
      }
      Trainee& veteran = *veterans[rank];
      veteran.loop->regroup({queue});
      veteran.train(0, first - 1);
      EXPECT_NE(released.wait_for(std::chrono::seconds(0)), std::future_status::ready);
      trained[rank].set_value();
      veteran.train(first - 1, kEvery);
      veteran.loop->finish();
      outer[rank] = veteran.outer();
    });
    releaser.wait();
    for (int rank : {1, 2}) {
      for (size_t i = 0; i < outer[0].size(); ++i)
        EXPECT_TRUE(at::equal(outer[rank][i], outer[0][i])) << fragments << " fragments, rank " << rank;
    }
  }
}

// A rank that carries no stripe waits for the other's takeover and averages, longer than the deadline of its site: for
// one that takes long, or for many of which none does.
TEST(DiLoCoXRegroup, ARankWithoutAStripeOutwaitsItsSitesDeadline) {
  const std::chrono::milliseconds deadline(600);
  const std::vector<std::vector<int64_t>> shapes(12, {40, 30});
  for (const int64_t fragments : {1, 12}) {
    Ranks site(2, [&](int, GroupConfig& config) { config.timeout = deadline; }), alone(1), both(2);
    DiLoCoXOptions o = options(12, OuterMode::sync);
    o.fragments = fragments;
    Trainee veteran(0, shapes);
    onRanks(alone, [&](int, const std::shared_ptr<OpQueue>& queue) {
      veteran.loop = std::make_unique<DiLoCoX>(veteran.parameters, queue, o);
      veteran.train(0, 12);
      veteran.loop->quiesce();
    });
    std::atomic<int> held{0};
    std::vector<at::Tensor> ended[2];
    const auto hold = [&](const std::string& op) {
      if (op != kTakeover && op != "outer_step") return;
      ++held;
      std::this_thread::sleep_for(fragments == 1 ? 3 * deadline : deadline / 5);
    };
    auto trains = std::async(std::launch::async, [&] {
      veteran.loop->regroup({std::make_shared<EngineQueue>(both.engine(0))});
      veteran.train(12, 24);
      veteran.loop->finish();
    });
    onRanks(site, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
      Trainee newcomer(1, shapes);
      newcomer.loop = std::make_unique<DiLoCoX>(newcomer.parameters, std::vector<std::shared_ptr<OpQueue>>(), o,
                                                OuterSite{queue, {0, 0}, {1}});
      std::vector<std::shared_ptr<OpQueue>> stripes;
      if (rank == 0) stripes.push_back(std::make_shared<HeldQueue>(both.engine(1), hold));
      newcomer.loop->regroup(stripes);
      newcomer.trainUntil(24);
      newcomer.loop->finish();
      for (const OuterParameter& p : newcomer.parameters)
        ended[rank].push_back(p.tensor.clone());
    });
    trains.get();
    for (size_t i = 0; i < shapes.size(); ++i) {
      EXPECT_TRUE(at::equal(ended[0][i], veteran.parameters[i].tensor)) << fragments << " fragments, " << i;
      EXPECT_TRUE(at::equal(ended[1][i], veteran.parameters[i].tensor)) << fragments << " fragments, " << i;
    }
    EXPECT_EQ(held, 2 * fragments);
  }
}

}  // namespace
}  // namespace lowcomm::test
