#include "collective/all_reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "codec/fused.h"
#include "collective/message_summary.h"
#include "collective/plan.h"
#include "collective/summer.h"
#include "collective_cases.h"
#include "ranks_on_threads.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::drawsOf;
using test::floatsOf;
using test::Ranks;

const Reduction kSum;
const Reduction kAverage{ReduceKind::sum, true};
const Reduction kScaledSum{ReduceKind::sum, false, 0.3, true};

// Floats after a round trip through a codec.
std::vector<float> decoded(const CodecSpec& spec, const std::vector<float>& x, const Draws& draws) {
  const auto codec = makeCodec(spec);
  return test::decoded(*codec, test::encoded(*codec, x, draws), x.size());
}

// The definition: a slice's contributions, all but its owner's decoded, summed in rank order in fp32, divided, and the
// result coded once more; in the tensor's own type.
Bytes byHand(const std::vector<Bytes>& inputs, const CodecSpec& codec, DType dtype, const Reduction& reduction,
             uint32_t slot = 0) {
  const int size = static_cast<int>(inputs.size());
  const size_t item = itemBytes(dtype);
  Bytes out(inputs[0].size());
  const auto slices = slicesOf(out.size() / item, codec, size);
  for (int owner = 0; owner < size; ++owner) {
    const auto [first, count] = slices[owner];
    std::vector<float> sum(count);
    for (int rank = 0; rank < size; ++rank) {
      Bytes x(inputs[rank].begin() + first * item, inputs[rank].begin() + (first + count) * item);
      if (reduction.premultiplied) scale(x.data(), x.data(), dtype, reduction.premultiply, count);
      std::vector<float> values = floatsOf(dtype, x);
      if (rank != owner) values = decoded(codec, values, drawsOf(rank, slot).slot(owner));
      for (size_t i = 0; i < count; ++i)
        sum[i] = rank == 0 ? values[i] : sum[i] + values[i];
    }
    for (float& s : sum)
      s = reduction.average ? s / static_cast<float>(size) : s;
    const auto result = decoded(codec, sum, drawsOf(owner, slot).slot(owner).again());
    for (size_t i = 0; i < count; ++i)
      test::fromFloat(dtype, out.data() + (first + i) * item, result[i]);
  }
  return out;
}

TEST(Slices, CoverATensorInWholeUnits) {
  for (const char* text : {"sym4:bucket=1024", "qsgd8:bucket=64", "fp16", "topk", "qsgd8:bucket=tensor",
                           "lattice4:axis=channel,C=24", "minmax8:bucket=65536"}) {
    const CodecSpec codec = CodecSpec::parse(text);
    for (int ranks : {1, 2, 3, 12}) {
      for (uint64_t n : {0, 24, 504, 1032, 100008, 1 << 20}) {
        const auto slices = slicesOf(n, codec, ranks);
        ASSERT_EQ(slices.size(), static_cast<size_t>(ranks));
        uint64_t at = 0;
        for (const Slice& slice : slices) {
          EXPECT_EQ(slice.first, at);
          EXPECT_LE(slice.count, slices[0].count);
          at += slice.count;
        }
        EXPECT_EQ(at, n);
      }
    }
  }
  // A unit is a bucket, a block or a row: nobody gets part of one but the last.
  const auto rows = slicesOf(1032, CodecSpec::parse("lattice4:axis=channel,C=24"), 3);  // 43 rows
  EXPECT_EQ(rows[0].count, 15u * 24);
  EXPECT_EQ(rows[2], (Slice{720, 312}));
  EXPECT_EQ(slicesOf(3000, CodecSpec::parse("sym4:bucket=1024"), 2), (std::vector<Slice>{{0, 2048}, {2048, 952}}));
  EXPECT_EQ(slicesOf(512, CodecSpec::parse("topk"), 2), (std::vector<Slice>{{0, 512}, {512, 0}}));
}

TEST(AllReduce, IsTheCodedSumOfCodedContributions) {
  for (const std::string& name : test::kCodecs) {
    if (name == "none") continue;
    const CodecSpec codec = CodecSpec::parse(name);
    for (int size : {2, 3, 5}) {
      Ranks ranks(size);
      for (DType dtype : test::kFloats) {
        for (const Reduction& reduction : {kSum, kAverage, kScaledSum}) {
          for (uint64_t any : {uint64_t{1}, uint64_t{700}, uint64_t{12 * 57344 + 13}}) {
            if (any > 1000 && (size != 3 || dtype == DType::float16)) continue;
            const uint64_t n = test::wholeRows(any, name);
            std::vector<Bytes> tensors;
            for (int rank = 0; rank < size; ++rank)
              tensors.push_back(test::randomTensor(dtype, n, static_cast<uint32_t>(rank + 1)));
            const Bytes expected = byHand(tensors, codec, dtype, reduction);
            ranks.expectRun("all_reduce", [&](int rank, OpContext& op) {
              allReduce(op, {{n, codec, dtype, tensors[rank].data(), drawsOf(rank)}}, reduction);
            });
            for (int rank = 0; rank < size; ++rank) {
              ASSERT_TRUE(tensors[rank] == expected) << name << " " << dtypeName(dtype) << " " << reduction.name()
                                                     << ", " << n << " elements, rank " << rank << " of " << size;
            }
          }
        }
      }
    }
  }
}

TEST(AllReduce, SeveralTensorsOfAnySizes) {
  for (int size : {2, 4, 12}) {
    Ranks ranks(size);
    const std::vector<std::pair<uint64_t, const char*>> cases = {
        {0, "sym4"}, {5, "qsgd8:bucket=64"}, {300000, "minmax4"}, {700, "topk"}, {100000, "sym4:bucket=128"}};
    std::vector<std::vector<Bytes>> tensors(cases.size());
    std::vector<Bytes> expected;
    for (size_t t = 0; t < cases.size(); ++t) {
      for (int rank = 0; rank < size; ++rank)
        tensors[t].push_back(test::randomTensor(DType::float32, cases[t].first, static_cast<uint32_t>(7 * rank + t)));
      expected.push_back(byHand(tensors[t], CodecSpec::parse(cases[t].second), DType::float32, kSum, 64 * t));
    }
    ranks.expectRun("all_reduce", [&](int rank, OpContext& op) {
      std::vector<AllReduceMessage> messages;
      for (size_t t = 0; t < cases.size(); ++t) {
        messages.push_back({cases[t].first, CodecSpec::parse(cases[t].second), DType::float32, tensors[t][rank].data(),
                            drawsOf(rank, 64 * t)});
      }
      allReduce(op, messages, kSum);
    });
    for (size_t t = 0; t < cases.size(); ++t) {
      for (int rank = 0; rank < size; ++rank)
        EXPECT_TRUE(tensors[t][rank] == expected[t]) << "tensor " << t << ", rank " << rank << " of " << size;
    }
  }
}

TEST(AllReduce, AloneNothingIsEncoded) {
  Ranks ranks(1);
  for (const Reduction& reduction : {kSum, kAverage, kScaledSum}) {
    Bytes x = test::randomTensor(DType::bfloat16, 1000, 1), expected = x;
    if (reduction.premultiplied) scale(expected.data(), expected.data(), DType::bfloat16, 0.3, 1000);
    const auto counters = ranks.expectRun("all_reduce", [&](int, OpContext& op) {
      allReduce(op, {{1000, CodecSpec::parse("minmax2"), DType::bfloat16, x.data(), {}}}, reduction);
    });
    EXPECT_TRUE(x == expected) << reduction.name();
    EXPECT_EQ(counters[0].wire_bytes, 0u);
  }
}

// Twice (W-1)/W of the codes a rank, whatever W is, and 20 bytes of frame for every 256 KiB or so.
TEST(AllReduce, BytesGrowAsRanksLessOneOverRanks) {
  const uint64_t n = 1 << 20;
  const CodecSpec codec = CodecSpec::parse("sym4:bucket=1024");
  const double codes = static_cast<double>(makeCodec(codec)->encodedBytes(n, DType::float32));
  for (int size : {2, 3, 4, 8}) {
    Ranks ranks(size);
    std::vector<Bytes> tensors(size, test::randomTensor(DType::float32, n, 3));
    const auto counters = ranks.expectRun("all_reduce", [&](int rank, OpContext& op) {
      allReduce(op, {{n, codec, DType::float32, tensors[rank].data(), drawsOf(rank)}}, kSum);
    });
    for (const OpCounters& moved : counters) {
      const double ideal = 2 * codes * (size - 1) / size;
      EXPECT_GT(static_cast<double>(moved.wire_bytes), 0.99 * ideal) << size;
      EXPECT_LT(static_cast<double>(moved.wire_bytes), 1.015 * ideal) << size;
      EXPECT_NEAR(static_cast<double>(moved.raw_bytes), 2.0 * 4 * n * (size - 1) / size, 4.0 * 1024 * size) << size;
    }
  }
}

TEST(AllReduce, WhatCannotBeSentIsNamedEverywhereAndTheGroupGoesOn) {
  const uint64_t n = 6 * 57344 + 13;
  const CodecSpec codec = CodecSpec::parse("qsgd8:bucket=64");
  for (int size : {2, 3}) {
    Ranks ranks(size);
    // In a slice for another, in the own one, and in the last block of all.
    for (uint64_t at : {uint64_t{3}, n / 2 + 1, n - 1}) {
      std::vector<std::vector<float>> x(size, std::vector<float>(n, 1.0f));
      x[1][at] = NAN;
      const auto outcomes = ranks.run("all_reduce", [&](int rank, OpContext& op) {
        allReduce(op, {{n, codec, DType::float32, x[rank].data(), drawsOf(rank)}}, kSum);
      });
      test::expectRefusedBy(1, outcomes, {"of the slice for rank", "nan"});
    }
    // Finite contributions whose sum is not: only the owner sees it.
    for (const auto& [name, value] : {std::pair("bf16", 2.5e38f), std::pair("qsgd8:bucket=64", 8e37f)}) {
      std::vector<std::vector<float>> x(size, std::vector<float>(n, 1.0f));
      for (auto& each : x)
        each[5] = value;
      const auto refused = ranks.run("all_reduce", [&](int rank, OpContext& op) {
        allReduce(op, {{n, CodecSpec::parse(name), DType::float32, x[rank].data(), drawsOf(rank)}}, kSum);
      });
      test::expectRefusedBy(0, refused, {"element 5 of the sum"});
    }
    ranks.expectRun("all_reduce", [&](int rank, OpContext& op) {
      std::vector<float> fine(n, 1.0f);
      allReduce(op, {{n, codec, DType::float32, fine.data(), drawsOf(rank)}}, kSum);
    });
  }
}

TEST(AllReduce, MistakesAreFoundBeforeAnythingIsSent) {
  Ranks ranks(2);
  std::vector<float> x(1000);
  std::vector<double> wide(1000);
  const auto run = [&](const AllReduceMessage& message, const Reduction& reduction) {
    return ranks.run("all_reduce", [&](int, OpContext& op) { allReduce(op, {message}, reduction); });
  };
  const CodecSpec sym = CodecSpec::parse("sym4");
  for (const auto& o : run({1000, CodecSpec{}, DType::opaque, x.data(), {}}, kSum))
    EXPECT_TRUE(o.is<TypeError>() && test::holds(o.what(), {"opaque"})) << o.what();
  for (const auto& o : run({1000, sym, DType::float64, wide.data(), {}}, kSum))
    EXPECT_TRUE(o.is<TypeError>() && test::holds(o.what(), {"float64"})) << o.what();
  for (const auto& o : run({1000, sym, DType::float32, x.data(), {}}, {ReduceKind::max}))
    EXPECT_TRUE(o.is<ValueError>() && test::holds(o.what(), {"max"})) << o.what();
  for (const auto& o : run({1000, sym, DType::float32, x.data(), {}, x.data()}, kScaledSum))
    EXPECT_TRUE(o.is<ValueError>() && test::holds(o.what(), {"premul_sum"})) << o.what();
  ranks.expectRun("all_reduce", [&](int, OpContext& op) {
    std::vector<float> fine(1000, 1.0f);
    allReduce(op, {{1000, sym, DType::float32, fine.data(), {}}}, kSum);
  });
}

// Where a sum is beyond the largest number of a 16-bit type, and where a bucket is poisoned: ranks end alike all the
// same, and a residual holds nothing that it could not go on from.
TEST(ErrorFeedback, SumsBeyondTheTypeSpoilNothing) {
  for (const char* name :
       {"bf16", "sym8", "minmax8", "qsgd8", "gauss4", "topk", "sym8:nonfinite=poison", "bf16:nonfinite=poison"}) {
    for (int size : {1, 2, 3}) {
      for (DType dtype : {DType::float16, DType::bfloat16, DType::float32}) {
        for (const Reduction& reduction : {kSum, kAverage}) {
          const bool policy = std::string(name).find("nonfinite") != std::string::npos;
          Ranks ranks(size);
          const uint64_t n = 3000;
          std::vector<std::vector<float>> residuals(size, std::vector<float>(n));
          for (bool large : {true, false}) {
            std::vector<Bytes> x(size, Bytes(n * itemBytes(dtype)));
            for (int rank = 0; rank < size; ++rank) {
              for (size_t i = 0; i < n; ++i) {
                const float value = large ? (i % 3 == 0 ? -40000.0f : 40000.0f + static_cast<float>(rank)) : 1.0f;
                test::fromFloat(dtype, x[rank].data() + i * itemBytes(dtype), value);
              }
            }
            if (large && policy) test::fromFloat(dtype, x[0].data() + 700 * itemBytes(dtype), INFINITY);
            ranks.expectRun("all_reduce", [&](int rank, OpContext& op) {
              allReduce(op, {{n, CodecSpec::parse(name), dtype, x[rank].data(), drawsOf(rank), residuals[rank].data()}},
                        reduction);
            });
            for (int rank = 1; rank < size; ++rank)
              EXPECT_TRUE(x[rank] == x[0]) << name << " " << dtypeName(dtype) << ": rank " << rank << " of " << size;
            for (const auto& residual : residuals) {
              for (float e : residual)
                ASSERT_TRUE(std::isfinite(e)) << name << " " << dtypeName(dtype) << " " << reduction.name() << size;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace lowcomm
