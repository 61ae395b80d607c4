// An all_reduce whose result stays in codes, of elements that are made as they are sent, with residuals in codes: the
// bits of one in memory.
#include "collective/coded_sums.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "base/float_env.h"
#include "codec/coded_residual.h"
#include "collective/all_reduce.h"
#include "collective/summer.h"
#include "collective_cases.h"
#include "kernels/isa/table.h"
#include "kernels/low_rank/low_rank.h"
#include "ranks_on_threads.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::normal;
using test::Ranks;

const Reduction kAverage{ReduceKind::sum, true};

struct Shape {
  uint64_t rows, columns, rank;
  uint64_t elements() const { return rows * columns; }
};
const std::vector<Shape> kShapes = {{48, 64, 4}, {40, 30, 0}, {130, 500, 0}, {1, 7, 0}, {90, 700, 3}, {1, 1, 0}};

// exchanged: fp32, and where a tensor has a rank its average takes the residual's place.
enum class Residuals { none, wide, coded, exchanged };

// What one rank ends a few steps with: the averages, then residuals as fp32 or codes, then factors.
struct Ended {
  std::vector<std::vector<float>> averages, factors;
  std::vector<Bytes> residuals;
  bool finite = true;
  bool operator==(const Ended&) const = default;
};

std::shared_ptr<const Codec> eightBits() {
  static const auto codec = makeCodec(CodecSpec::parse(CodedResidual::kEightBits));
  return codec;
}

Bytes kept(const std::vector<float>& x) {
  return test::encoded(*eightBits(), x);
}

// What the residual of such a tensor becomes.
std::vector<float> settled(const CodedAverage::Tensor& average, std::vector<float> residual,
                           const std::vector<float>& data) {
  const FloatEnv env;
  for (size_t i = 0; i < data.size() && !average.idle; ++i)
    residual[i] += data[i];
  kernels().low_rank->subtract(residual.data(), residual.data(), average.p.data(), average.r.data(), average.rows,
                               average.columns, average.rank);
  return residual;
}

// `elsewhere`: without data and, by `coded`, with residuals that are read and written by runs; else in memory, where a
// residual in codes is widened before the op and kept after it.
Ended run(OpContext& op, const std::string& codec, Residuals residuals, bool elsewhere, bool made, float bad) {
  const int rank = op.group.rank();
  Ended ended;
  std::vector<Bytes> codes;
  std::vector<std::vector<float>> wide;
  for (const Shape& shape : kShapes) {
    wide.emplace_back(shape.elements(), 0.0f);
    codes.push_back(kept(wide.back()));
    ended.factors.emplace_back(shape.rank * shape.columns);
    for (uint64_t k = 0; k < shape.rank; ++k)
      ended.factors.back()[k * shape.columns + k] = 1;
  }
  for (uint32_t step = 1; step <= 3; ++step) {
    op.sequence = step * 2;
    std::vector<std::vector<float>> data, minus;
    std::vector<MakeElements> makers(kShapes.size());
    std::vector<Bytes> next = codes;
    std::vector<std::vector<float>> next_wide = wide;
    std::vector<std::unique_ptr<CodedResidual>> lent;
    CodedAverage average;
    LowRankMessage message{DType::float32,
                           CodecSpec::parse(codec),
                           CodecSpec::parse(codec),
                           {5, streamOf(rank, 0), step},
                           {},
                           elsewhere ? &average : nullptr};
    for (size_t t = 0; t < kShapes.size(); ++t) {
      const uint64_t n = kShapes[t].elements();
      const bool idle = t < 2 && step == 2;
      data.push_back(idle ? std::vector<float>(n, 0.0f) : normal(n, 100 * step + 10 * t + rank));
      minus.push_back(idle ? std::vector<float>(n, 0.0f) : normal(n, 7 + step));
      if (bad != 0 && step == 3 && rank == 1 && t == 2) data[t][n / 2] = bad;
    }
    std::vector<std::vector<float>> differences = data;
    for (size_t t = 0; t < kShapes.size(); ++t) {
      const auto [rows, columns, of_rank] = kShapes[t];
      const uint64_t n = rows * columns;
      for (uint64_t i = 0; i < n; ++i)
        differences[t][i] -= minus[t][i];
      makers[t] = [&data, &minus, t](float* out, uint64_t first, uint64_t count) {
        for (uint64_t i = 0; i < count; ++i)
          out[i] = data[t][first + i] - minus[t][first + i];
      };
      LowRankTensor tensor{.data = elsewhere ? nullptr : differences[t].data(), .elements = n};
      tensor.rank = of_rank;
      tensor.rows = rows;
      tensor.columns = columns;
      tensor.factor = ended.factors[t].data();
      tensor.seed = 77 + t + step;
      tensor.slot = t * 2 * static_cast<uint64_t>(op.size());
      tensor.first_owner = static_cast<uint32_t>(t);
      if (elsewhere && made) tensor.elsewhere.make = &makers[t];
      if (elsewhere && !made) tensor.elsewhere.from = differences[t].data();
      if (residuals == Residuals::coded) wide[t] = test::decoded(*eightBits(), codes[t], n);
      if (residuals == Residuals::coded && elsewhere) {
        lent.push_back(std::make_unique<CodedResidual>(*eightBits(), n, codes[t], next[t]));
        tensor.elsewhere.coded = lent.back().get();
      } else if (residuals == Residuals::exchanged) {
        tensor.kept = wide[t].data();
        tensor.residual = next_wide[t].data();
        tensor.elsewhere.in_residual = of_rank > 0;
      } else if (residuals != Residuals::none) {
        tensor.residual = wide[t].data();
      }
      message.tensors.push_back(tensor);
    }
    ended.finite = lowRankAllReduce(op, message, kAverage);
    if (!ended.finite) return {.averages = {}, .factors = {}, .residuals = {}, .finite = false};
    ended.averages.clear();
    ended.residuals.clear();
    for (size_t t = 0; t < kShapes.size(); ++t) {
      std::vector<float> values = differences[t];
      if (elsewhere) {
        const FloatEnv env;
        values.assign(values.size(), NAN);
        uint64_t expected = 0;
        average.decode(t, [&](uint64_t first, uint64_t count, const float* x) {
          EXPECT_EQ(first, expected);
          expected += count;
          std::copy_n(x, count, values.data() + first);
        });
        EXPECT_EQ(expected, values.size());
      }
      ended.averages.push_back(values);
      if (residuals == Residuals::exchanged) {
        const bool is_settled = kShapes[t].rank == 0;
        wide[t] = is_settled ? next_wide[t] : settled(average.tensors[t], wide[t], differences[t]);
      }
      if (residuals == Residuals::coded) {
        codes[t] = elsewhere ? next[t] : kept(wide[t]);
        ended.residuals.push_back(codes[t]);
      } else {
        Bytes bytes(wide[t].size() * sizeof(float));
        std::memcpy(bytes.data(), wide[t].data(), bytes.size());
        ended.residuals.push_back(bytes);
      }
    }
  }
  return ended;
}

std::vector<Ended> onAll(int size, const std::string& codec, Residuals residuals, bool elsewhere, bool made,
                         float bad = 0) {
  Ranks ranks(size);
  std::vector<Ended> all(size);
  const auto outcomes =
      ranks.run("op", [&](int rank, OpContext& op) { all[rank] = run(op, codec, residuals, elsewhere, made, bad); });
  for (const auto& outcome : outcomes)
    EXPECT_TRUE(outcome.ok()) << outcome.what();
  return all;
}

const std::vector<std::string> kCodecs = {"sym4:bucket=128,nonfinite=poison",    "gauss2:nonfinite=poison",
                                          "qsgd4:bucket=512,nonfinite=poison",   "sym8:bucket=2048,nonfinite=poison",
                                          "topk:keep=0.05,nonfinite=poison",     "fp16",
                                          "qsgd8:bucket=tensor,nonfinite=poison"};

TEST(CodedSums, AreTheBitsOfThoseInMemory) {
  for (const int size : {2, 3}) {
    for (const std::string& codec : kCodecs) {
      if (size == 3 && codec != kCodecs[0] && codec != kCodecs[1]) continue;
      for (const Residuals residuals : {Residuals::none, Residuals::wide, Residuals::coded}) {
        const std::vector<Ended> expected = onAll(size, codec, residuals, /*elsewhere=*/false, /*made=*/false);
        for (const bool made : {false, true}) {
          const std::vector<Ended> found = onAll(size, codec, residuals, /*elsewhere=*/true, made);
          EXPECT_TRUE(found == expected) << codec << " of " << size << " ranks, residuals "
                                         << static_cast<int>(residuals) << (made ? ", made" : "");
          for (const Ended& rank : found)
            EXPECT_TRUE(rank.averages == found[0].averages) << codec;
        }
      }
    }
  }
}

TEST(CodedSums, InTheResidualsPlaceLeaveWhatTheResidualIsMadeOf) {
  for (const int size : {2, 3}) {
    const std::vector<Ended> expected = onAll(size, kCodecs[0], Residuals::wide, /*elsewhere=*/false, /*made=*/false);
    for (const bool made : {false, true})
      EXPECT_TRUE(onAll(size, kCodecs[0], Residuals::exchanged, /*elsewhere=*/true, made) == expected) << size;
  }
}

TEST(CodedSums, WhatIsNotFiniteIsSeenByAllRanks) {
  for (const float bad : {NAN, INFINITY}) {
    for (const Ended& ended : onAll(3, kCodecs[0], Residuals::coded, /*elsewhere=*/true, /*made=*/true, bad))
      EXPECT_FALSE(ended.finite);
  }
}

TEST(CodedSums, TakeTheBytesOfTheCodes) {
  Ranks ranks(2);
  constexpr uint64_t kElements = 1 << 20;
  ranks.run("op", [&](int rank, OpContext& op) {
    std::vector<float> x = normal(kElements, static_cast<uint32_t>(rank));
    AllReduceMessage message(CodecSpec::parse("sym4:bucket=128"), DType::float32, {});
    message.tensors.push_back({.elements = kElements, .elsewhere = {.from = x.data()}});
    std::shared_ptr<CodedSums> sums;
    message.sums = &sums;
    allReduce(op, {message}, kAverage);
    EXPECT_NEAR(static_cast<double>(sums->bytes()) / kElements, (4 + 32.0 / 128) / 8, 1e-3);
  });
}

TEST(CodedSums, NeedACodecAndASecondRank) {
  const auto refused = [](int size, const std::string& codec, const std::string& said) {
    Ranks ranks(size);
    const auto outcomes = ranks.run("op", [&](int, OpContext& op) {
      const std::vector<float> x(100);
      AllReduceMessage message(CodecSpec::parse(codec), DType::float32, {});
      message.tensors.push_back({.elements = 100, .elsewhere = {.from = x.data()}});
      std::shared_ptr<CodedSums> sums;
      message.sums = &sums;
      allReduce(op, {message}, kAverage);
    });
    for (const auto& outcome : outcomes) {
      EXPECT_TRUE(outcome.is<ValueError>());
      EXPECT_NE(outcome.what().find(said), std::string::npos) << outcome.what();
    }
  };
  refused(1, "sym4", "expected host memory and 2 ranks or more, got 1");
  refused(2, "none", "expected memory for what does not stay in codes");
}

}  // namespace
}  // namespace lowcomm
