#include "collective/collectives.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "collective/message_summary.h"
#include "collective/summer.h"
#include "collective_cases.h"
#include "ranks_on_threads.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::edgeTensors;
using test::Ranks;
using test::single;
using Tensor = test::TensorKind;

const Reduction kSum;
const Reduction kAverage{ReduceKind::sum, true};
const Reduction kScaledSum{ReduceKind::sum, false, 0.3, true};

bool isFloat(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
}

// One op of several messages: every rank's slices, and the definition of what the owner of a slice must get.
class Scatter {
 public:
  Scatter(int size, std::vector<Tensor> tensors, Reduction reduction, bool in_place, uint32_t step = 3)
      : size_(size), tensors_(std::move(tensors)), reduction_(reduction), in_place_(in_place), step_(step) {
    slices_.resize(size);
    outputs_.resize(size);
    for (int rank = 0; rank < size; ++rank) {
      for (size_t m = 0; m < tensors_.size(); ++m) {
        const auto& [layout, dtype] = tensors_[m];
        slices_[rank].emplace_back();
        for (int owner = 0; owner < size; ++owner)
          slices_[rank][m].push_back(
              test::randomTensor(dtype, layout.elements(), static_cast<uint32_t>(10000 * rank + 100 * owner + m)));
        outputs_[rank].push_back(in_place ? slices_[rank][m][rank]
                                          : Bytes(slices_[rank][m][rank].size(), std::byte{0xdd}));
      }
    }
  }

  void operator()(int rank, OpContext& op) {
    std::vector<ScatterMessage> messages;
    for (size_t m = 0; m < tensors_.size(); ++m) {
      ScatterMessage message{{tensors_[m].layout}, tensors_[m].dtype};
      for (const Bytes& slice : slices_[rank][m])
        message.inputs.push_back(slice.data());
      message.output = outputs_[rank][m].data();
      if (in_place_) message.inputs[rank] = message.output;
      message.draws = draws(rank, m);
      messages.push_back(std::move(message));
    }
    reduceScatter(op, messages, reduction_);
  }

  void expectDefinition() const {
    for (size_t m = 0; m < tensors_.size(); ++m) {
      for (int owner = 0; owner < size_; ++owner) {
        const auto& [layout, dtype] = tensors_[m];
        EXPECT_TRUE(outputs_[owner][m] == (isFloat(dtype) ? byHand(owner, m) : byKernels(owner, m)))
            << "rank " << owner << " of " << size_ << ", message " << m << ": " << dtypeName(dtype) << " "
            << reduceName(reduction_.kind) << " " << layout.text().substr(0, 200);
      }
    }
  }

  const Bytes& output(int rank, size_t m) const { return outputs_[rank][m]; }

 private:
  Draws draws(int rank, size_t m) const {
    return {5, static_cast<uint32_t>(rank << 16) + static_cast<uint32_t>(m * 300), step_};
  }

  Bytes contribution(int rank, int owner, size_t m) const {
    Bytes x = slices_[rank][m][owner];
    const DType dtype = tensors_[m].dtype;
    if (reduction_.premultiplied) scale(x.data(), x.data(), dtype, reduction_.premultiply, x.size() / itemBytes(dtype));
    return x;
  }

  // Sums in rank order in fp32; peers' contributions decoded, the owner's own as it is; rounded, then averaged.
  Bytes byHand(int owner, size_t m) const {
    const auto& [layout, dtype] = tensors_[m];
    const size_t item = itemBytes(dtype);
    std::vector<float> sum(layout.elements());
    for (int rank = 0; rank < size_; ++rank) {
      const Bytes x = contribution(rank, owner, m);
      Draws own = draws(rank, m);
      own.stream += static_cast<uint32_t>(owner * layout.segments().size());
      std::vector<float> values(sum.size());
      if (rank == owner) {
        for (size_t i = 0; i < values.size(); ++i)
          values[i] = test::toFloat(dtype, x.data() + i * item);
      } else {
        values = test::decodedFloats(layout, dtype, x, own);
      }
      for (size_t i = 0; i < sum.size(); ++i)
        sum[i] = rank == 0 ? values[i] : reduced(sum[i], values[i]);
    }
    Bytes out(sum.size() * item);
    for (size_t i = 0; i < sum.size(); ++i) {
      std::byte* element = out.data() + i * item;
      test::fromFloat(dtype, element, sum[i]);
      if (reduction_.average)
        test::fromFloat(dtype, element, test::toFloat(dtype, element) / static_cast<float>(size_));
    }
    return out;
  }

  float reduced(float a, float b) const {
    if (reduction_.kind == ReduceKind::product) return a * b;
    if (reduction_.kind == ReduceKind::min) return std::min(a, b);
    if (reduction_.kind == ReduceKind::max) return std::max(a, b);
    return a + b;
  }

  // Types that are reduced in themselves: reduce_test.cpp holds the kernels to a reference.
  Bytes byKernels(int owner, size_t m) const {
    const auto& [layout, dtype] = tensors_[m];
    Bytes sum = contribution(0, owner, m);
    for (int rank = 1; rank < size_; ++rank)
      reduceInto(sum.data(), contribution(rank, owner, m).data(), dtype, reduction_.kind, layout.elements());
    reduceFinish(sum.data(), sum.data(), dtype, layout.elements(), reduction_.average ? size_ : 0);
    return sum;
  }

  const int size_;
  const std::vector<Tensor> tensors_;
  const Reduction reduction_;
  const bool in_place_;
  const uint32_t step_;
  std::vector<std::vector<std::vector<Bytes>>> slices_;  // [rank][message][owner]
  std::vector<std::vector<Bytes>> outputs_;              // [rank][message]
};

std::vector<OpCounters> expectScatters(int size, std::vector<Tensor> tensors, const Reduction& reduction,
                                       bool in_place) {
  Scatter scatter(size, std::move(tensors), reduction, in_place);
  Ranks ranks(size);
  auto counters = ranks.expectRun("reduce_scatter", std::ref(scatter));
  scatter.expectDefinition();
  return counters;
}

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

TEST(ReduceScatter, SameBitsEveryTimeOtherDrawsOtherBits) {
  const std::vector<Tensor> tensors = {{single(100000, "qsgd4"), DType::float32}};
  Scatter first(3, tensors, kSum, false), second(3, tensors, kSum, false), later(3, tensors, kSum, false, 4);
  Ranks ranks(3);
  ranks.expectRun("reduce_scatter", std::ref(first));
  ranks.expectRun("reduce_scatter", std::ref(later));
  ranks.expectRun("reduce_scatter", std::ref(second));
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_TRUE(first.output(rank, 0) == second.output(rank, 0));
  EXPECT_FALSE(first.output(0, 0) == later.output(0, 0));
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
      const int size = 4;
      Ranks ranks(size);
      std::vector<Layout> layouts;
      for (uint64_t owner : {2, 0, 5, 1})
        layouts.push_back(single(owner * unit, codec));
      const auto slice = [&](int rank, int owner) {
        return test::randomTensor(DType::float32, layouts[owner].elements(), static_cast<uint32_t>(10 * rank + owner));
      };
      const auto draws = [](int rank) { return Draws{5, streamOf(rank, 0), 6}; };
      std::vector<Bytes> outputs;
      for (const Layout& layout : layouts)
        outputs.emplace_back(layout.elements() * 4, std::byte{0xdd});
      const auto counters = ranks.expectRun("reduce_scatter", [&](int rank, OpContext& op) {
        std::vector<Bytes> slices;
        ScatterMessage message{layouts, DType::float32, {}, outputs[rank].data(), draws(rank)};
        for (int owner = 0; owner < size; ++owner)
          slices.push_back(slice(rank, owner));
        for (const Bytes& each : slices)
          message.inputs.push_back(each.data());
        reduceScatter(op, {message}, kSum);
      });
      for (int owner = 0; owner < size; ++owner) {
        std::vector<float> sum(layouts[owner].elements());
        for (int rank = 0; rank < size; ++rank) {
          const Bytes x = slice(rank, owner);
          Draws own = draws(rank);
          own.stream += static_cast<uint32_t>(owner);
          std::vector<float> values = test::decodedFloats(layouts[owner], DType::float32, x, own);
          if (rank == owner) std::memcpy(values.data(), x.data(), x.size());
          for (size_t i = 0; i < sum.size(); ++i)
            sum[i] = rank == 0 ? values[i] : sum[i] + values[i];
        }
        EXPECT_EQ(std::memcmp(sum.data(), outputs[owner].data(), outputs[owner].size()), 0) << codec << owner;
        EXPECT_EQ(counters[owner].raw_bytes, (8 * unit - layouts[owner].elements()) * 4);
      }
    }
  }
}

}  // namespace
}  // namespace lowcomm
