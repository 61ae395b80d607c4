// An outer loop when something is wrong: the fault is named, and nothing is half-applied.
#include <atomic>
#include <future>
#include <limits>
#include <span>

#include "base/error.h"
#include "collective/context.h"
#include "diloco_ranks.h"

namespace lowcomm::test {
namespace {

void expectSame(const TensorMap& a, const TensorMap& b, const std::string& suffix) {
  for (const auto& [key, tensor] : a) {
    if (key.ends_with(suffix)) EXPECT_TRUE(at::equal(tensor, b.at(key))) << key;
  }
}

TEST(DiLoCoXFaults, NotFiniteIsDroppedEverywhere) {
  for (const std::string codec : {"none", "sym4:bucket=64"}) {
    for (int64_t rank_of : {0, 3}) {
      for (OuterMode mode : {OuterMode::sync, OuterMode::proceed}) {
        if (codec == "none" && rank_of > 0) continue;
        DiLoCoXOptions o = options(2, mode);
        if (codec != "none") o = coded(o, codec, rank_of);
        Ranks ranks(2);
        onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
          Trainee trainee(rank, kShapes);
          trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, queue, o);
          trainee.train(0, 5);
          const TensorMap before = trainee.loop->state();
          const at::Tensor good = trainee.parameters[0].tensor.clone();
          if (rank == 1) trainee.parameters[0].tensor[3][4] = std::numeric_limits<float>::quiet_NaN();
          const std::string error = thrownBy<ValueError>([&] { trainee.train(5, 9); });
          EXPECT_TRUE(holds(error, {"finite pseudo-gradients", rank == 1 ? "on this rank" : "on another rank"}));
          // Outer steps whose pseudo-gradients were taken before it have been applied; this one has not.
          const TensorMap after = trainee.loop->state();
          if (mode == OuterMode::sync) {
            for (const char* suffix : {".outer", ".momentum", ".residual", ".factor"})
              expectSame(before, after, suffix);
          }
          for (const auto& [key, tensor] : after) {
            if (!key.ends_with(".mark") && !key.ends_with(".message") && tensor.is_floating_point())
              EXPECT_TRUE(tensor.isfinite().all().item<bool>()) << key;
          }
          trainee.parameters[0].tensor.copy_(good);
          trainee.train(9, 16);
          trainee.loop->finish();
          EXPECT_TRUE(trainee.parameters[0].tensor.isfinite().all().item<bool>());
        });
      }
    }
  }
}

// A rank dies when some of its frames have come and others have not: exact, coded, and between a matrix's two factors.
TEST(DiLoCoXFaults, PeerLostInTheMiddleOfAMessageChangesNothing) {
  const std::vector<std::vector<int64_t>> large = {{512, 640}, {100000}};
  for (const std::string codec : {"none", "sym4:bucket=64"}) {
    for (int64_t rank_of : {0, 16}) {
      for (int frames : {3, 20}) {
        if (codec == "none" && rank_of > 0) continue;
        DiLoCoXOptions o = options(2, OuterMode::sync);
        if (codec != "none") o = coded(o, codec, rank_of);
        Ranks ranks(3, [](int, GroupConfig& config) { config.timeout = std::chrono::seconds(2); });
        std::atomic<bool> counting{false};
        std::atomic<int> sent{0};
        std::promise<void> reached;
        ranks.hub().tamper([&](int from, int, Lane lane, std::span<std::byte>) {
          if (from == 2 && lane == Lane::bulk && counting && ++sent == frames) reached.set_value();
        });
        auto killer = std::async(std::launch::async, [&, due = reached.get_future()] {
          if (due.wait_for(std::chrono::seconds(20)) == std::future_status::ready) ranks.hub().kill(2);
        });
        onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
          Trainee trainee(rank, large);
          trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, queue, o);
          trainee.train(0, 3);
          const TensorMap before = trainee.loop->state();
          if (rank == 2) counting = true;
          EXPECT_NE(thrownBy<PeerError>([&] { trainee.train(3, 40); }), kNothing) << rank << ", " << sent << " frames";
          if (rank == 2) return;
          const TensorMap after = trainee.loop->state();
          const int64_t steps = after.at("applied").item<int64_t>() - before.at("applied").item<int64_t>();
          if (steps > 0) return;  // this rank had all of it, the others may not
          for (const char* suffix : {".outer", ".momentum", ".residual", ".factor"})
            expectSame(before, after, suffix);
        });
        killer.wait();
        EXPECT_GE(sent, frames);
      }
    }
  }
}

// Two stages at two sites. One stage's outer step fails by itself, for its buffers: both stages drop theirs, and the
// next one is whole again.
TEST(DiLoCoXFaults, AStageThatFailedIsToldToTheOthers) {
  const auto patient = [](int, GroupConfig& config) { config.timeout = std::chrono::seconds(5); };
  Ranks stages[] = {Ranks(2, patient), Ranks(2, patient)}, clusters[] = {Ranks(2, patient), Ranks(2, patient)};
  DiLoCoXOptions o = coded(options(4, OuterMode::proceed), "sym4:bucket=64", 3);
  o.adapt_rank = o.adapt_sync_every = true;
  std::vector<std::future<int>> all;
  for (int device_codec = 0; device_codec < 2; ++device_codec) {
    for (int replica = 0; replica < 2; ++replica) {
      all.push_back(std::async(std::launch::async, [&, device_codec, replica] {
        Trainee trainee(replica, kShapes);
        const at::Tensor buffer = at::zeros({5});
        trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters,
                                                 std::make_shared<EngineQueue>(stages[device_codec].engine(replica)), o,
                                                 std::make_shared<EngineQueue>(clusters[replica].engine(device_codec)),
                                                 std::vector<OuterParameter>{{"b", buffer}});
        int errors = 0;
        for (int64_t step = 0; step < 40; ++step) {
          trainee.inner(step);
          if (step == 6 && device_codec == 1) buffer.fill_(std::numeric_limits<float>::infinity());
          if (step == 12 && device_codec == 1) buffer.fill_(0);
          errors += thrownBy<ValueError>([&] { trainee.loop->step(); }) != kNothing;
        }
        trainee.loop->finish();
        return errors;
      }));
    }
  }
  for (int i = 0; i < 4; ++i)
    EXPECT_GT(all[i].get(), 0) << "stage " << i / 2 << " replica " << i % 2;
}

TEST(DiLoCoXFaults, RefusesAnotherState) {
  Ranks ranks(2);
  onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Trainee trainee(rank, kShapes);
    trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters, queue, options(3, OuterMode::proceed));
    trainee.train(0, 4);
    const TensorMap good = trainee.loop->state();
    const auto refusal = [&](auto&& change) {
      TensorMap state = good;
      change(state);
      const std::string error = thrownBy<ValueError>([&] { trainee.loop->load(state); });
      const TensorMap kept = trainee.loop->state();
      for (const auto& [key, tensor] : good)
        EXPECT_TRUE(at::equal(tensor, kept.at(key))) << key;
      return error;
    };
    EXPECT_TRUE(holds(refusal([](TensorMap& s) { s["ranks"] = at::scalar_tensor(int64_t{3}, at::kLong); }),
                      {"a group of 2 ranks", "got one of 3"}));
    EXPECT_TRUE(holds(refusal([](TensorMap& s) { s["mode"] = at::scalar_tensor(int64_t{0}, at::kLong); }),
                      {"mode", "expected continue", "got the state of sync"}));
    EXPECT_TRUE(holds(refusal([](TensorMap& s) { s["fragments"] = at::scalar_tensor(int64_t{2}, at::kLong); }),
                      {"fragments", "expected 1", "got 2"}));
    EXPECT_TRUE(holds(refusal([](TensorMap& s) { s.erase("p3.outer"); }), {"'p3.outer'", "got none"}));
    EXPECT_TRUE(
        holds(refusal([](TensorMap& s) { s["p1.momentum"] = at::zeros({99}); }), {"p1.momentum", "[100]", "[99]"}));
    trainee.loop->load(good);
  });
}

// A check is queued behind the next message of its fragment, which the other fragment's outer step does not wait for.
TEST(DiLoCoXFaults, AnOuterStepDoesNotWaitForAMessageBeforeACheck) {
  Ranks ranks(2);
  DiLoCoXOptions o = options(4, OuterMode::proceed);
  o.fragments = 2;
  o.check_every = 1;
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  std::atomic<int> trained{0};
  onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    int sent = 0;
    const auto hold = [&sent, released](const std::string& op) {
      if (op != "outer_step" || ++sent != 3) return;  // the first fragment's second
      EXPECT_EQ(released.wait_for(std::chrono::seconds(20)), std::future_status::ready) << "it was waited for";
    };
    Trainee trainee(rank, kShapes);
    trainee.loop = std::make_unique<DiLoCoX>(trainee.parameters,
                                             rank == 0 ? std::make_shared<HeldQueue>(ranks.engine(0), hold) : queue, o);
    trainee.train(0, 8);  // the second fragment's second outer step comes after its first message, not the held one
    if (++trained == 2) release.set_value();
    trainee.train(8, 16);
    trainee.loop->finish();
    if (rank == 0) EXPECT_GE(sent, 3);
  });
}

}  // namespace
}  // namespace lowcomm::test
