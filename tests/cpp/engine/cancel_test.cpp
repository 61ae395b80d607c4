#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "collective/all_reduce.h"
#include "collective/collectives.h"
#include "collective/summer.h"
#include "engine/engine.h"
#include "engine/groups.h"
#include "forwarding_transport.h"

// Ops that are given up: the op ends on every rank, the group lives, the next op is right.

namespace lowcomm {
namespace {

using test::Group;
using test::holds;
using test::Outcome;

// The terms of one rank: other numbers in each op.
struct Values {
  Values(int rank, uint32_t op, size_t elements) : data(elements) {
    for (size_t i = 0; i < elements; ++i)
      data[i] = static_cast<float>(std::sin(static_cast<double>(i) * 0.37 + rank * 11 + op));
  }
  std::vector<float> data;
};

void sum(OpContext& op, std::vector<float>& data, const std::string& codec, float* residual = nullptr) {
  allReduce(op,
            {AllReduceMessage{
                data.size(), CodecSpec::parse(codec), DType::float32, data.data(), {5, 0, op.sequence}, residual}},
            Reduction{});
}

bool isGivenUp(const Outcome& outcome, int by, const std::string& why, uint32_t sequence) {
  EXPECT_TRUE(outcome.is<PeerRefusal>()) << outcome.what();
  return bool(holds(outcome.what(), {"was given up by rank " + std::to_string(by) + ": " + why,
                                     "sequence " + std::to_string(sequence)}));
}

// Waits until the rank's op waits for a peer.
void untilItWaits(Engine& engine) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (engine.record().json().find("\"doing\"") == std::string::npos) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << engine.record().json();
    std::this_thread::sleep_for(milliseconds(1));
  }
}

class Cancel : public testing::TestWithParam<bool> {
 protected:
  // An all_reduce of all ranks that must be right, to the bit where it is exact.
  static void expectSum(Group& group, const std::string& codec = "none") {
    const int size = group->size();
    std::vector<std::vector<float>> results(size);
    group->expectRun("all_reduce", [&](int rank, OpContext& op) {
      results[rank] = Values(rank, 3, 30'000).data;
      sum(op, results[rank], codec);
    });
    std::vector<float> want(30'000);
    for (int rank = 0; rank < size; ++rank) {
      const std::vector<float> share = Values(rank, 3, 30'000).data;
      std::transform(want.begin(), want.end(), share.begin(), want.begin(), std::plus());
    }
    for (const auto& result : results) {
      EXPECT_EQ(result, results[0]);
      if (codec == "none") {
        EXPECT_EQ(result, want);
      } else {
        for (size_t i = 0; i < want.size(); ++i)
          ASSERT_NEAR(result[i], want[i], 0.1f * static_cast<float>(size));
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Engine, Cancel, testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "OverTcp" : "OverMemory"); });

// One rank has not come, the others are in the middle. Whoever gives up, those that wait end at once and the one that
// comes later is refused; then the next op is right.
TEST_P(Cancel, UnderWay) {
  for (const int size : {2, 3, 4}) {
    for (const std::string codec : {"none", "minmax8"}) {
      Group group(size, GetParam());
      uint32_t sequence = 0;
      for (int by = 1; by < size; ++by) {
        ++sequence;
        std::vector<std::vector<float>> data;
        for (int rank = 0; rank < size; ++rank)
          data.push_back(Values(rank, sequence, 300'000).data);
        std::vector<std::future<Outcome>> pending;
        const auto job = [&](int rank, OpContext& op) { sum(op, data[rank], codec); };
        for (int rank = 1; rank < size; ++rank)
          pending.push_back(group->start(rank, "all_reduce", job));
        untilItWaits(group.engine(by));
        EXPECT_TRUE(group.engine(by).cancel(sequence, "enough of it"));
        EXPECT_FALSE(group.engine(by).cancel(sequence, "once more"));
        for (const Outcome& outcome : group->finish(std::move(pending)))
          EXPECT_TRUE(isGivenUp(outcome, by, "enough of it", sequence)) << outcome.what();
        pending.clear();
        pending.push_back(group->start(0, "all_reduce", job));
        EXPECT_TRUE(isGivenUp(group->finish(std::move(pending))[0], by, "enough of it", sequence));
        expectSum(group, codec);
        ++sequence;
      }
    }
  }
}

// The rank that has not come gives up an op that the others are in: from its queue, at once, on the calling thread.
TEST_P(Cancel, InTheQueue) {
  Group group(3, GetParam());
  std::promise<void> let_go;
  std::vector<std::future<Outcome>> first, second;
  first.push_back(group->start(0, "held", [&](int, OpContext&) { let_go.get_future().wait_for(kLong); }));
  for (const int rank : {1, 2})
    first.push_back(group->start(rank, "held", [](int, OpContext&) {}));
  std::vector<std::vector<float>> data(3, std::vector<float>(100'000, 1.0f));
  for (const int rank : {0, 1, 2})
    second.push_back(group->start(rank, "all_reduce", [&](int at, OpContext& op) { sum(op, data[at], "qsgd8"); }));
  EXPECT_TRUE(group.engine(0).cancel(2, "not now"));
  ASSERT_EQ(second[0].wait_for(milliseconds(0)), std::future_status::ready) << "it was only queued";
  const std::vector<Outcome> outcomes = group->finish(std::move(second));
  for (const Outcome& outcome : outcomes)
    EXPECT_TRUE(isGivenUp(outcome, 0, "not now", 2)) << outcome.what();
  EXPECT_EQ(outcomes[0].ended_on, std::this_thread::get_id());
  let_go.set_value();
  for (const Outcome& outcome : group->finish(std::move(first)))
    EXPECT_TRUE(outcome.ok()) << outcome.what();
  expectSum(group);
}

// An op that is over cannot be given up; a rank that has ended an op does not care who gives it up.
TEST_P(Cancel, AfterTheOp) {
  Group group(3, GetParam());
  expectSum(group);
  EXPECT_FALSE(group.engine(1).cancel(1, "too late"));
  EXPECT_FALSE(group.engine(1).cancel(7, "too early"));
  std::vector<std::future<Outcome>> pending;
  std::vector<std::byte> room(100);
  for (const int rank : {0, 1, 2}) {
    pending.push_back(group->start(rank, "lopsided", [&](int at, OpContext& op) {
      if (at != 2) return;
      const auto coming = op.begin(1, [&] { return op.group.transport.irecv(Lane::bulk, 1, op.first_tag, room); });
      op.wait(*coming, 1, "waiting for what does not come");
    }));
  }
  untilItWaits(group.engine(2));
  group.engine(0).drain();
  group.engine(1).drain();
  EXPECT_FALSE(group.engine(0).cancel(2, "it is over here"));
  EXPECT_TRUE(group.engine(2).cancel(2, "nobody else is left"));
  const std::vector<Outcome> outcomes = group->finish(std::move(pending));
  EXPECT_TRUE(outcomes[0].ok() && outcomes[1].ok());
  EXPECT_TRUE(isGivenUp(outcomes[2], 2, "nobody else is left", 2));
  expectSum(group);
}

// Several ops are given up together, by several ranks, in another order than they were issued in.
TEST_P(Cancel, TwoAtOnce) {
  for (int round = 0; round < 20; ++round) {
    Group group(4, GetParam());
    std::vector<std::vector<std::future<Outcome>>> pending(3);
    std::vector<std::vector<std::vector<float>>> data(3, {4, std::vector<float>(50'000, 1.0f)});
    std::vector<test::Ranks::Job> jobs;
    for (uint32_t op = 0; op < 3; ++op) {
      jobs.emplace_back([&data, op](int at, OpContext& context) { sum(context, data[op][at], "none"); });
      for (const int rank : {1, 2, 3})
        pending[op].push_back(group->start(rank, "all_reduce", jobs[op]));
    }
    std::thread one([&] {
      for (const uint32_t sequence : {3, 1})
        group.engine(1).cancel(sequence, "by one");
    });
    std::thread two([&] {
      for (const uint32_t sequence : {1, 2})
        group.engine(2).cancel(sequence, "by two");
    });
    one.join();
    two.join();
    for (uint32_t op = 0; op < 3; ++op) {
      for (const Outcome& outcome : group->finish(std::move(pending[op]))) {
        EXPECT_TRUE(outcome.is<PeerRefusal>());
        EXPECT_TRUE(holds(outcome.what(), {"was given up by rank ", ": by ", "sequence " + std::to_string(op + 1)}));
      }
    }
    std::vector<std::future<Outcome>> late;
    for (uint32_t op = 0; op < 3; ++op)
      late.push_back(group->start(0, "all_reduce", jobs[op]));
    for (const Outcome& outcome : group->finish(std::move(late)))
      EXPECT_TRUE(outcome.is<PeerRefusal>()) << outcome.what();
    expectSum(group);
  }
}

// Random ranks give up random ops at random moments. An op then fails on a rank because it was given up, or is right
// there; an op that nobody gave up is right everywhere, always, and nothing is kept of those that were.
TEST_P(Cancel, AtRandomMomentsEveryLaterOpIsRight) {
  constexpr int kRounds = 80;
  std::mt19937 random(7);
  for (const int size : {2, 4}) {
    Group group(size, GetParam());
    uint32_t sequence = 0;
    int given_up = 0;
    size_t held = 0, in_use = 0;
    for (int round = 0; round < 2 * kRounds; ++round) {
      const size_t elements = 1 + random() % 60'000;
      const std::string codec = random() % 2 ? "none" : "minmax8:bucket=1024";
      const int cancels = static_cast<int>(random() % 3);
      ++sequence;
      std::vector<std::vector<float>> data(size);
      std::vector<std::thread> threads;
      std::vector<std::optional<std::future<Outcome>>> pending(size);
      const auto pause = [](unsigned most) { std::this_thread::sleep_for(std::chrono::microseconds(most)); };
      for (int rank = 0; rank < size; ++rank) {
        const unsigned wait = random() % 600;
        threads.emplace_back([&, rank, wait] {
          pause(wait);
          pending[rank] = group->start(rank, "all_reduce", [&](int at, OpContext& op) {
            data[at] = Values(at, sequence, elements).data;
            sum(op, data[at], codec);
          });
        });
      }
      std::atomic<int> done{0};
      for (int i = 0; i < cancels; ++i) {
        const unsigned wait = random() % 1500;
        const int by = static_cast<int>(random() % size);
        threads.emplace_back([&, by, wait] {
          pause(wait);
          done += group.engine(by).cancel(sequence, "at random");
        });
      }
      for (std::thread& thread : threads)
        thread.join();
      std::vector<float> want(elements);
      for (int rank = 0; rank < size; ++rank) {
        const std::vector<float> share = Values(rank, sequence, elements).data;
        std::transform(want.begin(), want.end(), share.begin(), want.begin(), std::plus());
      }
      for (int rank = 0; rank < size; ++rank) {
        std::vector<std::future<Outcome>> one;
        one.push_back(std::move(*pending[rank]));
        const Outcome outcome = group->finish(std::move(one))[0];
        if (!outcome.ok()) {
          ++given_up;
          ASSERT_TRUE(outcome.is<PeerRefusal>()) << outcome.what();
          ASSERT_TRUE(holds(outcome.what(), {"was given up by rank ", "at random"}));
          ASSERT_GT(done, 0) << "nobody gave it up";
        } else if (codec == "none") {
          ASSERT_EQ(data[rank], want) << "round " << round;
        } else {
          for (size_t i = 0; i < elements; ++i)
            ASSERT_NEAR(data[rank][i], want[i], 0.1f) << "round " << round;
        }
      }
      if (round % kRounds != kRounds - 1) continue;
      expectSum(group);
      ++sequence;
      for (int rank = 0; rank < size; ++rank)
        group.engine(rank).drain();
      if (round < kRounds) {
        held = group.engine(0).group().frames.held();
        in_use = ::mallinfo2().uordblks;
      }
    }
    EXPECT_GT(given_up, 20);
    EXPECT_LE(group.engine(0).group().frames.held(), held + (4u << 20));
    EXPECT_LT(::mallinfo2().uordblks, in_use + (1u << 20));
  }
}

// A group that ends while an op of it is given up ends as ever.
TEST_P(Cancel, AndTheGroupsEnd) {
  for (int round = 0; round < 30; ++round) {
    Group group(3, GetParam());
    std::vector<std::future<Outcome>> pending;
    for (const int rank : {0, 1})
      pending.push_back(group->start(rank, "barrier", [](int, OpContext& op) { barrier(op); }));
    std::thread cancels([&] { group.engine(0).cancel(1, "an op"); });
    group.engine(1).abort("the group");
    cancels.join();
    for (const Outcome& outcome : group->finish(std::move(pending)))
      EXPECT_TRUE(outcome.is<PeerError>()) << outcome.what();
  }
}

}  // namespace
}  // namespace lowcomm
