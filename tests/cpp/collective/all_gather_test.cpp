#include "collective/collectives.h"

#include <gtest/gtest.h>

#include "collective/message_summary.h"
#include "oracles.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using namespace test;
using Tensor = test::TensorKind;

TEST(AllGather, EveryRankEndsWithTheOwnersDecodedBits) {
  for (int size = 1; size <= 12; ++size) {
    for (DType dtype : test::kFloats) {
      if (size > 5 && dtype != test::kFloats[size % 3]) continue;  // time: all of them up to 5 ranks, then in turn
      expectGathers(size, edgeTensors(dtype), size % 2);
    }
  }
}

TEST(AllGather, NoneCarriesEveryType) {
  std::vector<Tensor> tensors;
  for (DType dtype : test::kAllTypes) {
    for (uint64_t n : {0, 1, 511, 512, 513, 70000})
      tensors.push_back({single(n, "none"), dtype});
  }
  for (bool in_place : {false, true})
    expectGathers(3, tensors, in_place);
}

// More frames than the window has rounds, the last one short.
TEST(AllGather, ManyChunks) {
  for (int size : {2, 3}) {
    for (bool in_place : {false, true}) {
      expectGathers(size, {{single(7 * 16384 + 13, "none"), DType::float32}}, in_place);
      expectGathers(size, {{single(6 * 131072 + 13, "minmax4"), DType::bfloat16}}, in_place);
      expectGathers(size, {{single(6 * 65536 + 513, "qsgd8:bucket=65536"), DType::float32}}, in_place);
    }
  }
}

TEST(AllGather, LayoutsOfManySegments) {
  for (int size : {2, 3, 7}) {
    for (uint32_t seed = 0; seed < 2; ++seed) {
      expectGathers(size,
                    {{test::mixedLayout(100, seed), DType::float32},
                     {test::mixedLayout(5, seed + 50, 50000), DType::float16},
                     {single(700, "none"), DType::int64}},
                    seed % 2);
    }
  }
}

// (W−1)·n elements out and in, a header a frame, and one description a peer.
TEST(AllGather, CountsItsBytes) {
  for (int size : {1, 2, 4}) {
    for (uint64_t n : {0, 1000, 200000}) {
      for (const char* codec : {"none", "minmax8"}) {
        const MessagePlan plan = planMessage(single(n, codec), DType::float32, kMinChunkBytes);
        uint64_t frames = kFrameHeaderBytes + describe("all_gather", {plan}).text().size();
        for (const Frame& chunk : plan.frames)
          frames += kFrameHeaderBytes + chunk.payload_bytes;
        for (const OpCounters& counters : expectGathers(size, {{plan.layout, plan.dtype}}, false)) {
          EXPECT_EQ(counters.raw_bytes, n * 4 * (size - 1));
          EXPECT_EQ(counters.wire_bytes, frames * (size - 1));
          EXPECT_EQ(counters.received_bytes, frames * (size - 1));
        }
      }
    }
  }
}

TEST(AllGather, RefusesATypeItsCodecDoesNotTake) {
  Ranks ranks(2);
  Gather wrong(2, {{single(10, "minmax8"), DType::int32}}, false);
  for (const auto& outcome : ranks.run("all_gather", [&](int rank, OpContext& op) { wrong(rank, op); })) {
    EXPECT_TRUE(outcome.is<TypeError>()) << outcome.what();
    EXPECT_EQ(outcome.counters.wire_bytes, 0u);
  }
  Gather right(2, {{single(10, "minmax8"), DType::float32}}, false);
  ranks.expectRun("all_gather", std::ref(right));
  right.expectDefinition();
}

}  // namespace
}  // namespace lowcomm
