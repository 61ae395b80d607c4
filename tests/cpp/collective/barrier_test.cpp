// barrier and monitored barrier: nobody passes before all have come, and who does not come is named.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/error.h"
#include "collective/collectives.h"
#include "ranks_on_threads.h"

namespace lowcomm {
namespace {

using namespace std::chrono_literals;
using test::holds;
using test::Outcome;
using test::Ranks;

const auto kBarrier = [](int, OpContext& op) { barrier(op); };

Ranks::Job monitored(std::chrono::milliseconds timeout, bool all = false) {
  return [timeout, all](int, OpContext& op) { monitoredBarrier(op, timeout, all); };
}

TEST(Barrier, NobodyPassesBeforeAllHaveCome) {
  for (int size : {1, 2, 4}) {
    Ranks ranks(size);
    for (const Ranks::Job& job : {Ranks::Job(kBarrier), monitored(10s)}) {
      std::atomic<int> come{0};
      ranks.expectRun("barrier", [&](int rank, OpContext& op) {
        std::this_thread::sleep_for(rank * 5ms);
        ++come;
        job(rank, op);
        EXPECT_EQ(come, size);
      });
    }
  }
}

TEST(Barrier, RanksInAnotherOpAreNamedAndTheGroupGoesOn) {
  Ranks ranks(3);
  for (const Outcome& outcome : ranks.run("op", [&](int rank, OpContext& op) {
         float x = 0;
         if (rank == 1) return broadcast(op, {{1, CodecSpec{}, DType::float32, &x}}, 0);
         barrier(op);
       })) {
    EXPECT_TRUE(outcome.is<PeerRefusal>()) << outcome.what();
  }
  ranks.expectRun("barrier", kBarrier);
}

TEST(MonitoredBarrier, NamesAllRanksThatDoNotCome) {
  Ranks ranks(4);
  std::vector<std::future<Outcome>> pending;
  for (int rank : {0, 2})
    pending.push_back(ranks.start(rank, "monitored_barrier", monitored(2s, /*all=*/true)));
  const auto outcomes = ranks.finish(std::move(pending));
  EXPECT_TRUE(holds(outcomes[0].what(), {"Ranks 1, 3 failed to pass monitoredBarrier"})) << outcomes[0].what();
  EXPECT_TRUE(outcomes[1].is<PeerError>() && holds(outcomes[1].what(), {"Rank 2 successfully reached", "Ranks 1, 3"}));
}

TEST(MonitoredBarrier, NamesTheTimeOutWhereItIsOverAtOnce) {
  Ranks ranks(2);
  std::vector<std::future<Outcome>> pending;
  pending.push_back(ranks.start(0, "monitored_barrier", monitored(0ms)));
  EXPECT_TRUE(holds(ranks.finish(std::move(pending))[0].what(), {"Rank 0 timed out in monitoredBarrier"}));
}

TEST(MonitoredBarrier, NamesARankThatIsInAnotherOp) {
  Ranks ranks(2);
  const auto outcomes = ranks.run("monitored_barrier", [&](int rank, OpContext& op) {
    float x = 0;
    if (rank == 1) return broadcast(op, {{1, CodecSpec{}, DType::float32, &x}}, 1);
    monitoredBarrier(op, 10s, false);
  });
  for (const Outcome& outcome : outcomes)
    EXPECT_TRUE(outcome.is<PeerError>() && holds(outcome.what(), {"op"})) << outcome.what();
}

}  // namespace
}  // namespace lowcomm
