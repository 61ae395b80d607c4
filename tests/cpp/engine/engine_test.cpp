#include "engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>

#include "collective/collectives.h"
#include "ranks_on_threads.h"
#include "side_by_side.h"

namespace lowcomm {
namespace {

using std::chrono::milliseconds;
using test::holds;
using test::Outcome;
using test::Ranks;

// Blocks until every rank has called it, or fails as an op does.
void meet(int, OpContext& op) {
  agree(op, {{{"op", "meet"}}});
}

// A job that stays until it is let go, or for ten seconds.
struct Gate {
  std::promise<void> opened;
  std::shared_future<void> open = opened.get_future().share();
  void pass() const { open.wait_for(std::chrono::seconds(10)); }
};

// A failure on one rank once the exchange is whole (a copy into the caller's memory) is that rank's own affair.
TEST(Engine, AFailureAfterTheExchangeEndsItsOpAlone) {
  Ranks ranks(2);
  const auto outcomes = ranks.run("copied", [](int rank, OpContext& op) {
    meet(rank, op);
    op.whole = true;
    if (rank == 0) throw std::runtime_error("no room");
  });
  EXPECT_EQ(outcomes[0].what(), "no room");
  EXPECT_FALSE(outcomes[0].is<PeerError>());
  EXPECT_TRUE(outcomes[1].ok()) << outcomes[1].what();
  ranks.expectRun("after", meet);
}

// An op that ran elsewhere and failed ends the group on every rank, with its own words as the cause.
TEST(Engine, AFaultElsewhereEndsTheGroup) {
  Ranks ranks(3);
  ranks.expectRun("before", meet);
  const std::string said = ranks.engine(0).fault("op 7 timed out elsewhere", 7);
  EXPECT_EQ(said, "") << "nobody else had a cause, and nothing is recorded";
  EXPECT_EQ(ranks.engine(0).endedWhy(), "op 7 timed out elsewhere");
  EXPECT_TRUE(holds(ranks.engine(0).fault("another", 8), {"the group was ended: op 7 timed out elsewhere"}));
  EXPECT_TRUE(holds(ranks.engine(1).fault("a closed connection", 7), {"; rank 0 gave the group up: op 7 timed out"}));
  const auto outcomes = ranks.run("after", meet);
  for (int rank : {0, 1})
    EXPECT_TRUE(holds(outcomes[rank].what(), {"op 7 timed out elsewhere"}));
  for (const Outcome& outcome : outcomes) {  // rank 2 hears either of them first
    EXPECT_TRUE(outcome.is<PeerError>());
    EXPECT_TRUE(holds(outcome.what(), {"gave the group up"}) || holds(outcome.what(), {"op 7 timed out elsewhere"}));
  }
}

TEST(Engine, RunsOpsInOrderOfSubmission) {
  Ranks ranks(3);
  std::vector<std::vector<uint32_t>> ran(3);
  std::vector<std::vector<std::string>> events(3);
  for (uint32_t i = 1; i <= 20; ++i) {
    for (int rank = 0; rank < 3; ++rank) {
      const uint32_t sequence = ranks.engine(rank).submit(
          "op" + std::to_string(i),
          [&, rank](OpContext& op) {
            meet(rank, op);
            ran[rank].push_back(op.sequence);
            events[rank].push_back(op.op);
          },
          [&, rank](std::exception_ptr error, const OpCounters&) {
            EXPECT_FALSE(error);
            events[rank].push_back("done");
          });
      EXPECT_EQ(sequence, i);
    }
  }
  for (int rank = 0; rank < 3; ++rank) {
    ranks.engine(rank).drain();
    ASSERT_EQ(ran[rank].size(), 20u);
    for (uint32_t i = 1; i <= 20; ++i) {
      EXPECT_EQ(ran[rank][i - 1], i);
      EXPECT_EQ(events[rank][2 * i - 2], "op" + std::to_string(i));
      EXPECT_EQ(events[rank][2 * i - 1], "done");  // before the next job starts
    }
  }
}

TEST(Engine, SubmitFromManyThreads) {
  Ranks ranks(1);
  std::vector<uint32_t> ran;
  std::atomic<uint64_t> given{0};
  test::sideBySide(8, [&](int) {
    for (int i = 0; i < 50; ++i)
      given += ranks.engine(0).submit(
          "op", [&](OpContext& op) { ran.push_back(op.sequence); }, [](std::exception_ptr, const OpCounters&) {});
  });
  ranks.engine(0).drain();
  EXPECT_EQ(given, 400u * 401 / 2);
  EXPECT_EQ(ran.size(), 400u);
  EXPECT_TRUE(std::is_sorted(ran.begin(), ran.end()));
}

TEST(Engine, DrainWaitsForEverything) {
  Ranks ranks(1);
  ranks.engine(0).drain();
  Gate gate;
  auto slow = ranks.start(0, "slow", [&](int, OpContext&) { gate.pass(); });
  auto fast = ranks.start(0, "fast", [](int, OpContext&) {});
  EXPECT_FALSE(ranks.engine(0).drainFor(milliseconds(30)));
  gate.opened.set_value();
  EXPECT_TRUE(ranks.engine(0).drainFor(milliseconds(10000)));
  for (auto* future : {&slow, &fast})
    EXPECT_EQ(future->wait_for(milliseconds(0)), std::future_status::ready);
}

TEST(Engine, WhatAJobHoldsIsGoneWhenDrained) {
  Ranks ranks(1);
  for (int i = 0; i < 20; ++i) {
    auto held = std::make_shared<int>(1);
    ranks.engine(0).submit("op", [held](OpContext&) {}, [held](std::exception_ptr, const OpCounters&) {});
    ranks.engine(0).drain();
    EXPECT_EQ(held.use_count(), 1);
  }
}

TEST(Engine, ShutdownRunsWhatIsQueuedThenRefuses) {
  Ranks ranks(2);
  std::vector<std::future<Outcome>> pending;
  for (int i = 0; i < 5; ++i) {
    for (int rank : {0, 1})
      pending.push_back(ranks.start(rank, "meet", meet));
  }
  std::thread other([&] { ranks.engine(0).shutdown(); });
  ranks.engine(0).shutdown();
  ranks.engine(1).shutdown();
  other.join();
  ranks.engine(0).shutdown();
  for (const Outcome& outcome : ranks.finish(std::move(pending)))
    EXPECT_TRUE(outcome.ok()) << outcome.what();
  for (const Outcome& outcome : ranks.run("late", meet)) {
    EXPECT_TRUE(outcome.is<PeerError>());
    EXPECT_TRUE(holds(outcome.what(), {"late", "shut down"}));
    EXPECT_EQ(outcome.ended_on, std::this_thread::get_id());
  }
  ranks.engine(0).drain();
}

TEST(Engine, AbortWhileAnOpWaits) {
  Ranks ranks(3, [](int, GroupConfig& config) { config.group = "inner"; });
  std::vector<std::future<Outcome>> pending;
  for (const char* op : {"meet", "queued"})  // the others never come
    pending.push_back(ranks.start(0, op, meet));
  std::this_thread::sleep_for(milliseconds(30));
  ranks.engine(0).abort("the user asked");
  ranks.engine(0).abort("again");
  const auto outcomes = ranks.finish(std::move(pending));
  for (const Outcome& outcome : outcomes)
    EXPECT_TRUE(outcome.is<PeerError>()) << outcome.what();
  EXPECT_TRUE(holds(outcomes[0].what(), {"op meet", "sequence 1", "cancelled", "the user asked"}));
  EXPECT_TRUE(holds(outcomes[1].what(), {"queued", "group inner", "First cause: the user asked"}));
  EXPECT_EQ(ranks.engine(0).endedWhy(), "the user asked");
  const Outcome late = ranks.start(0, "late", meet).get();
  EXPECT_TRUE(holds(late.what(), {"late", "First cause: the user asked"}));
  EXPECT_EQ(late.ended_on, std::this_thread::get_id());
  EXPECT_TRUE(ranks.engine(0).drainFor(milliseconds(10000)));
}

TEST(Engine, PeersOfAnAbortedRankLearnWhy) {
  for (bool waiting : {true, false}) {
    Ranks ranks(3);
    std::vector<std::future<Outcome>> pending;
    const auto start = [&] {
      for (int rank : {1, 2})
        pending.push_back(ranks.start(rank, "meet", meet));
    };
    if (waiting) start();
    std::this_thread::sleep_for(milliseconds(20));
    ranks.engine(0).abort("rank 0: the optimizer diverged");
    if (!waiting) start();
    for (const Outcome& outcome : ranks.finish(std::move(pending)))
      EXPECT_TRUE(holds(outcome.what(), {"op meet", "rank 0", "the optimizer diverged"}));
  }
}

TEST(Engine, ACallersMistakeEndsItsOpOnly) {
  Ranks ranks(2);
  for (const Outcome& outcome : ranks.run("wrong", [](int, OpContext&) { throw ValueError("too long"); })) {
    EXPECT_TRUE(outcome.is<ValueError>());
    EXPECT_EQ(outcome.what(), "too long");
  }
  for (const Outcome& outcome : ranks.run("wrong", [](int, OpContext&) { throw TypeError("int"); }))
    EXPECT_TRUE(outcome.is<TypeError>());
  ranks.expectRun("meet", meet);
}

TEST(Engine, AMistakeInTheMiddleOfAConversationEndsTheGroup) {
  Ranks ranks(2);
  std::vector<std::future<Outcome>> pending;
  pending.push_back(ranks.start(0, "meet", [](int, OpContext& op) {
    op.conversing = true;
    throw ValueError("found late");
  }));
  pending.push_back(ranks.start(1, "meet", meet));
  ranks.engine(0).drain();
  ranks.engine(0).shutdown();
  const auto outcomes = ranks.finish(std::move(pending));
  EXPECT_TRUE(outcomes[0].is<PeerError>());
  EXPECT_TRUE(holds(outcomes[1].what(), {"rank 0", "found late"}));
}

TEST(Engine, AnyOtherExceptionEndsTheGroupAndIsTold) {
  Ranks ranks(2);
  std::vector<std::future<Outcome>> pending;
  pending.push_back(ranks.start(0, "meet", [](int, OpContext&) { throw std::bad_alloc(); }));
  pending.push_back(ranks.start(1, "meet", meet));
  pending.push_back(ranks.start(1, "next", meet));
  ranks.engine(0).drain();
  ranks.engine(0).shutdown();  // its control lane closes: rank 1's wait breaks
  const auto outcomes = ranks.finish(std::move(pending));
  EXPECT_TRUE(outcomes[0].is<PeerError>());
  EXPECT_TRUE(holds(outcomes[0].what(), {"meet failed on rank 0", "bad_alloc"}));
  EXPECT_TRUE(holds(outcomes[1].what(), {"rank 0", "bad_alloc"}));
  EXPECT_TRUE(holds(outcomes[2].what(), {"next", "First cause"}));
}

size_t threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<size_t>(std::distance(begin(tasks), end(tasks)));
}

TEST(Engine, LeavesNoThreadBehind) {
  {
    Ranks warm(2);
  }
  const size_t before = threads();
  for (int i = 0; i < 20; ++i) {
    Ranks ranks(4);
    EXPECT_GE(threads(), before + 4);
    ranks.expectRun("meet", meet);
    if (i % 2) ranks.engine(1).abort("enough");
  }
  EXPECT_EQ(threads(), before);
}

}  // namespace
}  // namespace lowcomm
