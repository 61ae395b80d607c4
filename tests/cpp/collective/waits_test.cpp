// Whom an op waits for, what its encoding loses by the sample, and the stretches that a profiler is told.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>
#include <string>
#include <thread>

#include "collective/all_reduce.h"
#include "collective/collectives.h"
#include "collective/source_sink.h"
#include "collective/summer.h"
#include "collective_cases.h"
#include "p2p_cases.h"
#include "ranks_on_threads.h"

namespace lowcomm {
namespace {

using std::chrono::milliseconds;
using test::Bytes;
using test::Ranks;

void gather(OpContext& op, uint64_t elements, const std::string& codec, const Bytes& input) {
  std::vector<Bytes> outputs(op.group.size(), Bytes(elements * 4));
  GatherMessage message{{test::single(elements, codec)}, DType::float32, input.data()};
  message.draws.step = op.sequence;
  for (auto& output : outputs)
    message.outputs.push_back(output.data());
  allGather(op, {message});
}

// Whether all other ranks' flight records say that they wait for it.
bool isWaitedFor(Ranks& ranks, int slow) {
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const std::string wait = "\"wait\": {\"rank\": " + std::to_string(slow) + ",";
    if (rank != slow && ranks.engine(rank).record().json().find(wait) == std::string::npos) return false;
  }
  return true;
}

// The slow rank comes when the others have waited for it longer than they can have waited for one another: not before
// all of them wait for it, and then as much later. Two frames are sent before anybody waits, so nobody waits for
// another afterwards.
TEST(Waits, ASlowRankIsTheOneThatIsWaitedFor) {
  constexpr uint64_t kElements = 2 * 16384;
  for (int slow = 0; slow < 4; ++slow) {
    Ranks ranks(4, [](int, GroupConfig& config) { config.flight_record = 1; });
    const Bytes input = test::randomTensor(DType::float32, kElements, 1);
    const auto begun = OpContext::Clock::now();
    const auto counters = ranks.expectRun("all_gather", [&](int rank, OpContext& op) {
      if (rank == slow) {
        while (!isWaitedFor(ranks, slow) && OpContext::Clock::now() - begun < std::chrono::seconds(10))
          std::this_thread::sleep_for(milliseconds(1));
        std::this_thread::sleep_for(OpContext::Clock::now() - begun + milliseconds(20));
      }
      gather(op, kElements, "none", input);
    });
    for (int rank = 0; rank < 4; ++rank) {
      const auto& waits = counters[rank].wait_by_peer;
      ASSERT_EQ(waits.size(), 4u);
      EXPECT_EQ(waits[rank].count(), 0);
      std::chrono::nanoseconds all{0};
      for (const auto& wait : waits)
        all += wait;
      EXPECT_EQ(all, counters[rank].wait);
      if (rank == slow) continue;
      EXPECT_EQ(std::max_element(waits.begin(), waits.end()) - waits.begin(), slow);
    }
  }
}

TEST(Waits, StretchesAddUpToTheCounters) {
  Ranks ranks(2);
  std::vector<Timeline> timelines(2);
  const Bytes input = test::randomTensor(DType::float32, 1000000, 1);
  const auto counters = ranks.expectRun("all_gather", [&](int rank, OpContext& op) {
    op.timeline = &timelines[rank];
    gather(op, 1000000, "sym4:bucket=1024", input);
  });
  for (int rank : {0, 1}) {
    std::chrono::nanoseconds encode{0}, wait{0}, decode{0};
    for (const Stretch& stretch : timelines[rank])
      (stretch.doing == Doing::encode ? encode
       : stretch.doing == Doing::wait ? wait
                                      : decode) += stretch.end - stretch.start;
    EXPECT_EQ(encode, counters[rank].encode);
    EXPECT_EQ(wait, counters[rank].wait);
    EXPECT_EQ(decode, counters[rank].decode);
    EXPECT_GT(std::min({encode, wait, decode}).count(), 0);
  }
}

double relative(const Loss& loss) {
  return std::sqrt(loss.lost / loss.whole);
}

// Of all of a tensor.
double relative(const Bytes& x, const Bytes& decoded) {
  Loss loss;
  addLoss(loss, reinterpret_cast<const float*>(x.data()), reinterpret_cast<const float*>(decoded.data()), x.size() / 4);
  return relative(loss);
}

TEST(LossSample, IsNearTheWholesAndOneAnOp) {
  for (const char* codec :
       {"sym4:bucket=1024", "minmax8:bucket=1024", "qsgd4:bucket=512", "gauss4:bucket=512", "bf16"}) {
    Ranks ranks(2);
    const uint64_t elements = 700001;
    const Bytes input = test::randomTensor(DType::float32, elements, 1);
    const double whole = relative(input, test::asDecoded(test::single(elements, codec), DType::float32, input, {}));
    for (int op = 0; op < 3; ++op) {
      for (const OpCounters& counters :
           ranks.expectRun("all_gather", [&](int, OpContext& op) { gather(op, elements, codec, input); })) {
        EXPECT_NEAR(relative(counters.loss), whole, 0.25 * whole) << codec;
        EXPECT_LT(counters.loss.whole, 4 * 4096 * 10.0) << "a sample, not the whole";
      }
    }
  }
}

TEST(LossSample, MovesFromStepToStepAndStaysInTheRun) {
  const MessagePlan plan = planMessage(test::single(3 * 65536 + 5, "minmax8:bucket=1024"), DType::float32, 65536);
  ASSERT_GT(plan.frames.size(), 2u);
  std::set<uint64_t> places;
  for (uint32_t step = 0; step < 50; ++step) {
    size_t taken = 0;
    for (size_t k = 0; k < plan.frames.size(); ++k) {
      const lowcomm::Run& run = plan.frames[k].runs[0];
      if (const auto window = windowOf({}, k, plan.frames.size(), run, step)) {
        ++taken;
        EXPECT_LE(window->first + window->count, run.count);
        EXPECT_EQ((run.offset + window->first) % 1024, 0u);
        EXPECT_LE(window->count, kMostSampled);
        places.insert(run.at + window->first);
      }
    }
    EXPECT_EQ(taken, 1u);
  }
  EXPECT_GT(places.size(), 20u);
}

TEST(LossSample, NothingOfWhatIsExactOrTooLong) {
  const auto first = [](const char* codec, uint64_t elements) {
    return planMessage(test::single(elements, codec), DType::float32, 65536).frames[0].runs[0];
  };
  EXPECT_FALSE(windowOf({}, 0, 1, first("none", 5000), 0));
  EXPECT_FALSE(windowOf({}, 0, 1, first("minmax8:bucket=65536", 70000), 0));
  EXPECT_FALSE(windowOf({}, 0, 1, first("topk:keep=0.2", 20000), 0));
  EXPECT_EQ(windowOf({}, 0, 1, first("topk:keep=0.2", 10000), 0)->count, 10000u);
  EXPECT_EQ(windowOf({}, 0, 1, first("minmax8:bucket=16384", 70000), 0)->count, 16384u);
  EXPECT_EQ(windowOf({}, 0, 1, first("minmax8:bucket=65536", 5), 0)->count, 5u);
  EXPECT_FALSE(windowOf({1, 1}, 0, 1, first("minmax8:bucket=64", 5000), 0)) << "taken";
}

// With error feedback what is encoded is the tensor and what earlier ones lost.
TEST(LossSample, CountsWhatIsEncodedUnderErrorFeedback) {
  Ranks ranks(2);
  const uint64_t elements = 65536;
  const Bytes input = test::randomTensor(DType::float32, elements, 3);
  std::vector<std::vector<float>> residuals(2, std::vector<float>(elements, 100.0f));  // dwarfs the tensor
  const auto counters = ranks.expectRun("all_reduce", [&](int rank, OpContext& op) {
    Bytes data = input;
    const AllReduceMessage message{
        elements, CodecSpec::parse("minmax4:bucket=1024"), DType::float32, data.data(), {}, residuals[rank].data()};
    allReduce(op, {message}, Reduction{});
  });
  for (const OpCounters& one : counters) {
    EXPECT_NEAR(one.loss.whole, 4096 * 1e4, 0.05 * 4096 * 1e4);
    EXPECT_GT(relative(one.loss), 0);
    EXPECT_LT(relative(one.loss), 0.05) << "steps are those of the tensor's spread";
  }
}

TEST(LossSample, OfMessagesIsTheSenders) {
  Ranks ranks(2);
  const test::Tensor x = test::Tensor::random(300000, 1);
  test::Tensor y = x.empty();
  const auto received = test::receiving(ranks.engine(1), y, 0);
  const auto sent = test::sending(ranks.engine(0), x, 1);
  test::together(ranks, [&](int rank, Engine& engine) { test::expectFinish(engine, rank == 0 ? sent : received); });
  const double whole = relative(x.data, y.data);
  EXPECT_NEAR(relative(sent->op.counters.loss), whole, 0.25 * whole);
  EXPECT_FALSE(received->op.counters.loss.taken());
  EXPECT_EQ(received->op.counters.wait_by_peer.size(), 2u);
}

}  // namespace
}  // namespace lowcomm
