#include "collective/collectives.h"

#include <gtest/gtest.h>

#include <cmath>

#include "collective/message_summary.h"
#include "oracles.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using namespace test;
using Tensor = test::TensorKind;

const Reduction kSum;
const Reduction kAverage{ReduceKind::sum, true};
const Reduction kScaledSum{ReduceKind::sum, false, 0.3, true};

TEST(ReduceScatter, IsTheSumInRankOrderOfDecodedContributions) {
  for (int size = 1; size <= 12; ++size) {
    for (DType dtype : test::kFloats) {
      if (size > 5 && dtype != test::kFloats[size % 3]) continue;  // time: all of them up to 5 ranks, then in turn
      expectScatters(size, edgeTensors(dtype), size % 4 ? kSum : kAverage, size % 2);
    }
  }
}

TEST(ReduceScatter, AverageAndPremultiplied) {
  for (int size : {1, 2, 3, 5}) {
    for (DType dtype : test::kFloats) {
      for (bool in_place : {false, true}) {
        expectScatters(size, edgeTensors(dtype), kAverage, in_place);
        expectScatters(size, edgeTensors(dtype), kScaledSum, in_place);
      }
    }
  }
}

TEST(ReduceScatter, ExactInEveryTypeAndKind) {
  for (ReduceKind kind : {ReduceKind::sum, ReduceKind::product, ReduceKind::min, ReduceKind::max, ReduceKind::bit_and,
                          ReduceKind::bit_or, ReduceKind::bit_xor}) {
    std::vector<Tensor> tensors;
    for (DType dtype : test::kAllTypes) {
      if (!reduceSupports(dtype, kind)) continue;
      for (uint64_t n : {0, 1, 511, 512, 513, 20000})
        tensors.push_back({single(n, "none"), dtype});
    }
    for (int size : {2, 3, 4})
      expectScatters(size, tensors, {kind}, size % 2);
  }
}

TEST(ReduceScatter, ManyChunks) {
  for (int size : {2, 3}) {
    for (bool in_place : {false, true}) {
      expectScatters(size, {{single(7 * 16384 + 13, "none"), DType::float32}}, kSum, in_place);
      expectScatters(size, {{single(6 * 131072 + 13, "minmax4"), DType::bfloat16}}, kAverage, in_place);
      expectScatters(size, {{single(6 * 65536 + 513, "qsgd8:bucket=65536"), DType::float32}}, kScaledSum, in_place);
    }
  }
}

TEST(ReduceScatter, LayoutsOfManySegments) {
  for (int size : {2, 3, 7}) {
    for (uint32_t seed = 0; seed < 2; ++seed) {
      const Reduction& reduction = size == 2 ? kAverage : size == 3 ? kScaledSum : kSum;
      expectScatters(size,
                     {{test::mixedLayout(30, seed), DType::float32},
                      {test::mixedLayout(5, seed + 50, 30000), DType::float16},
                      {single(700, "none"), DType::float64}},
                     reduction, seed % 2);
    }
  }
}

// (W−1)/W of the input goes out, and as much comes in.
TEST(ReduceScatter, CountsItsBytes) {
  for (int size : {1, 2, 4}) {
    for (uint64_t n : {0, 1000, 100000}) {
      for (const char* codec : {"none", "qsgd8"}) {
        const MessagePlan plan = planMessage(single(n, codec), DType::float32, kMinChunkBytes);
        uint64_t frames = kFrameHeaderBytes + describe("reduce_scatter", {plan}).text().size() +
                          std::string("reduce op=sum\n").size();
        for (const Frame& chunk : plan.frames)
          frames += kFrameHeaderBytes + chunk.payload_bytes;
        for (const OpCounters& counters : expectScatters(size, {{plan.layout, plan.dtype}}, kSum, false)) {
          EXPECT_EQ(counters.raw_bytes, n * 4 * (size - 1));
          EXPECT_EQ(counters.wire_bytes, frames * (size - 1));
          EXPECT_EQ(counters.received_bytes, frames * (size - 1));
        }
      }
    }
  }
}

TEST(ReduceScatter, PoisonedBucketsReachTheSum) {
  const Layout layout = single(200, "sym4:bucket=64,nonfinite=poison");
  std::vector<std::vector<float>> outputs(2, std::vector<float>(200));
  Ranks ranks(2);
  ranks.expectRun("reduce_scatter", [&](int rank, OpContext& op) {
    std::vector<float> slice(200, 1.0f);
    slice[3] = -INFINITY;
    slice[70] = NAN;
    op.group.scaled.clear();
    ScatterMessage message{{layout}, DType::float32};
    message.inputs = {slice.data(), slice.data()};
    message.output = outputs[rank].data();
    reduceScatter(op, {message}, kSum);
  });
  for (const std::vector<float>& y : outputs) {
    EXPECT_TRUE(std::isnan(y[0]) && std::isnan(y[3]) && std::isnan(y[70]) && std::isnan(y[127]));
    EXPECT_EQ(y[150], 1.875f);  // 1 of its own, 7/8 of a bucket's largest from its peer
  }
}

TEST(ReduceScatter, RefusesWhatItCannotReduce) {
  const struct {
    Tensor tensor;
    Reduction reduction;
    const char* part;
  } cases[] = {
      {{single(10, "none"), DType::int16}, kSum, "int16"},
      {{single(10, "none"), DType::float32}, {ReduceKind::bit_xor}, "bxor"},
      {{single(10, "qsgd8"), DType::int32}, kSum, "int32"},
  };
  Ranks ranks(2);
  for (const auto& c : cases) {
    Scatter wrong(2, {c.tensor}, c.reduction, false);
    for (const auto& outcome : ranks.run("reduce_scatter", std::ref(wrong))) {
      EXPECT_TRUE(outcome.is<TypeError>());
      EXPECT_TRUE(test::holds(outcome.what(), {c.part}));
    }
  }
  Scatter right(2, {{single(10, "none"), DType::int32}}, kSum, false);
  ranks.expectRun("reduce_scatter", std::ref(right));
  right.expectDefinition();
}

TEST(ReduceScatter, SlicesOfDifferentSizes) {
  for (const char* codec : {"none", "qsgd4:bucket=512", "topk", "minmax8:bucket=64"}) {
    for (uint64_t unit : {uint64_t{100}, uint64_t{60000}}) {
      std::vector<Layout> layouts;
      for (uint64_t owner : {2, 0, 5, 1})
        layouts.push_back(single(owner * unit, codec));
      const auto counters = expectScatters(4, {{layouts, DType::float32}}, kSum, false);
      for (int owner = 0; owner < 4; ++owner)
        EXPECT_EQ(counters[owner].raw_bytes, (8 * unit - layouts[owner].elements()) * 4) << codec;
    }
  }
}

}  // namespace
}  // namespace lowcomm
