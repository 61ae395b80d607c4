#include "collective/all_reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>

#include "collective/summer.h"
#include "collective_cases.h"
#include "ranks_on_threads.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::Ranks;

const Reduction kSum;
const Reduction kAverage{ReduceKind::sum, true};

struct Shape {
  uint64_t rows, columns, rank;  // rank 0: by codes alone
};

// One rank's tensors and what their compression keeps.
struct Side {
  std::vector<Shape> shapes;
  DType dtype = DType::float32;
  std::vector<Bytes> data;
  std::vector<std::vector<float>> residuals, factors;
  bool finite = false;
  std::string projection;  // P's codec; empty: the tensors'
  bool measures = false;
  std::vector<std::vector<double>> energies;  // of each tensor, where it measures

  Side(const std::vector<Shape>& shapes, DType dtype) : shapes(shapes), dtype(dtype) {
    for (size_t t = 0; t < shapes.size(); ++t) {
      const auto [rows, columns, rank] = shapes[t];
      residuals.emplace_back(rows * columns);
      factors.emplace_back(rank * columns);
      for (uint64_t k = 0; k < rank; ++k)
        factors[t][k * columns + k] = 1;
    }
  }

  void run(OpContext& op, const std::string& codec, const Reduction& reduction, bool feedback, uint32_t step,
           std::vector<size_t> which = {}) {
    LowRankMessage message{dtype,
                           CodecSpec::parse(codec),
                           CodecSpec::parse(projection.empty() ? codec : projection),
                           {5, streamOf(op.group.rank(), 0), step},
                           {}};
    if (which.empty()) {
      which.resize(shapes.size());
      std::iota(which.begin(), which.end(), 0);
    }
    const auto before = residuals;
    energies.assign(shapes.size(), {});
    for (size_t t : which) {
      const auto [rows, columns, rank] = shapes[t];
      const bool elsewhere = feedback && t % 2 == 0;  // half of the residuals come from other memory
      if (elsewhere) residuals[t].assign(rows * columns, NAN);
      message.tensors.push_back({data[t].data(), rows * columns, feedback ? residuals[t].data() : nullptr,
                                 elsewhere ? before[t].data() : nullptr, rows, columns, rank, factors[t].data(),
                                 77 + t + 16 * step, static_cast<uint32_t>(t * 2 * op.group.size()),
                                 static_cast<uint32_t>(t)});
      if (!measures || rank == 0) continue;
      energies[t].resize(rank);
      message.tensors.back().energies = energies[t].data();
    }
    finite = lowRankAllReduce(op, message, reduction);
  }
};

std::vector<double> numbers(const Side& side, size_t t) {
  std::vector<double> x(side.data[t].size() / itemBytes(side.dtype));
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = test::toFloat(side.dtype, side.data[t].data() + i * itemBytes(side.dtype));
  return x;
}

const std::vector<Shape> kShapes = {{48, 64, 4}, {40, 30, 0}, {200, 7, 2}, {16, 1040, 3}, {1, 2000, 0}};

std::vector<std::unique_ptr<Side>> sides(int size, const std::vector<Shape>& shapes, DType dtype = DType::float32) {
  std::vector<std::unique_ptr<Side>> all;
  for (int rank = 0; rank < size; ++rank)
    all.push_back(std::make_unique<Side>(shapes, dtype));
  return all;
}

void newGradients(std::vector<std::unique_ptr<Side>>& all, uint32_t step) {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    all[rank]->data.clear();
    for (size_t t = 0; t < all[rank]->shapes.size(); ++t) {
      const auto [rows, columns, of] = all[rank]->shapes[t];
      all[rank]->data.push_back(
          test::randomTensor(all[rank]->dtype, rows * columns, static_cast<uint32_t>(100 * step + 10 * t + rank)));
    }
  }
}

void expectAlike(const std::vector<std::unique_ptr<Side>>& all) {
  for (const auto& side : all) {
    EXPECT_TRUE(side->finite);
    EXPECT_TRUE(side->data == all[0]->data);
    EXPECT_TRUE(side->factors == all[0]->factors);
  }
}

// Σ over ranks and steps of what came in is Σ of the residuals and of what was applied, in fp64. The rounding left: a
// few operations in fp32 on numbers of the largest one's size a rank and step.
TEST(CompressedAllReduce, LosesNothing) {
  constexpr int kSteps = 4;
  for (int size : {1, 2, 3}) {
    for (const std::string codec : {"sym4:bucket=64,nonfinite=poison", "qsgd4:bucket=128,nonfinite=poison",
                                    "gauss4:nonfinite=poison", "topk:nonfinite=poison", "sign1:nonfinite=poison"}) {
      for (DType dtype : test::kFloats) {
        for (const Reduction& reduction : {kSum, kAverage}) {
          Ranks ranks(size);
          auto all = sides(size, kShapes, dtype);
          for (auto& side : all)
            side->projection = codec == "topk:nonfinite=poison" ? "sym8:bucket=64,nonfinite=poison" : "";
          std::vector<std::vector<double>> owed(kShapes.size());
          double largest = 0;
          for (uint32_t step = 0; step < kSteps; ++step) {
            newGradients(all, step);
            for (size_t t = 0; t < kShapes.size(); ++t) {
              owed[t].resize(kShapes[t].rows * kShapes[t].columns);
              for (const auto& side : all) {
                const auto x = numbers(*side, t);
                for (size_t i = 0; i < x.size(); ++i) {
                  owed[t][i] += x[i];
                  largest = std::max({largest, std::abs(x[i]), std::abs(double{side->residuals[t][i]})});
                }
              }
            }
            ranks.expectRun("all_reduce", [&](int rank, OpContext& op) {
              all[rank]->run(op, codec, reduction, /*feedback=*/true, step);
            });
            expectAlike(all);
            const double times = reduction.average ? size : 1;
            for (size_t t = 0; t < kShapes.size(); ++t) {
              const auto x = numbers(*all[0], t);
              for (size_t i = 0; i < x.size(); ++i)
                owed[t][i] -= times * x[i];
            }
          }
          for (size_t t = 0; t < kShapes.size(); ++t) {
            double held = 0;
            const double tolerance = size * kSteps * 64 * largest * 0x1p-24;
            for (size_t i = 0; i < owed[t].size(); ++i) {
              double left = owed[t][i];
              for (const auto& side : all) {
                left -= double{side->residuals[t][i]};
                held = std::max(held, std::abs(double{side->residuals[t][i]}));
              }
              ASSERT_NEAR(left, 0, tolerance) << codec << ", " << dtypeName(dtype) << ", " << reduction.name()
                                              << ", element " << i << " of tensor " << t << ", " << size << " ranks";
            }
            // A residual holds something, or the test would show nothing; one rank alone loses nothing but to a rank.
            if (size > 1 || kShapes[t].rank > 0) {
              EXPECT_GT(held, 100 * tolerance) << codec << ", tensor " << t;
            }
          }
        }
      }
    }
  }
}

// The rest of the message changes nothing: a resumed run has other buckets at first.
TEST(CompressedAllReduce, ATensorsBitsAreItsOwn) {
  const std::string codec = "qsgd4:bucket=64,nonfinite=poison";
  Ranks ranks(3);
  auto together = sides(3, kShapes), apart = sides(3, kShapes);
  for (uint32_t step = 0; step < 3; ++step) {
    newGradients(together, step);
    newGradients(apart, step);
    ranks.expectRun("all_reduce",
                    [&](int rank, OpContext& op) { together[rank]->run(op, codec, kAverage, true, step); });
    for (const std::vector<size_t>& which : {std::vector<size_t>{4, 0}, {3}, {1, 2}}) {
      ranks.expectRun("all_reduce",
                      [&](int rank, OpContext& op) { apart[rank]->run(op, codec, kAverage, true, step, which); });
    }
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(together[rank]->data == apart[rank]->data);
      EXPECT_TRUE(together[rank]->residuals == apart[rank]->residuals);
      EXPECT_TRUE(together[rank]->factors == apart[rank]->factors);
    }
  }
}

// A matrix of that rank is found in two calls, except for the codec: the first one's R spans its rows.
TEST(CompressedAllReduce, WarmStartFindsALowRankMatrix) {
  constexpr uint64_t kRows = 60, kColumns = 80, kRank = 4;
  Ranks ranks(2);
  auto all = sides(2, {{kRows, kColumns, kRank}});
  const std::vector<float> u = test::normal(kRows * kRank, 50), v = test::normal(kColumns * kRank, 51);
  std::vector<float> whole(kRows * kColumns);
  for (uint64_t i = 0; i < kRows; ++i) {
    for (uint64_t j = 0; j < kColumns; ++j) {
      for (uint64_t k = 0; k < kRank; ++k)
        whole[i * kColumns + j] += u[i * kRank + k] * v[j * kRank + k];
    }
  }
  std::vector<double> errors;
  for (uint32_t step = 0; step < 3; ++step) {
    for (auto& side : all) {
      const auto* bytes = reinterpret_cast<const std::byte*>(whole.data());
      side->data = {Bytes(bytes, bytes + whole.size() * sizeof(float))};
    }
    ranks.expectRun("all_reduce", [&](int rank, OpContext& op) {
      all[rank]->run(op, "sym8:bucket=64,nonfinite=poison", kAverage, /*feedback=*/false, step);
    });
    expectAlike(all);
    const auto x = numbers(*all[0], 0);
    double lost = 0, size = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      lost += (x[i] - whole[i]) * (x[i] - whole[i]);
      size += double{whole[i]} * whole[i];
    }
    errors.push_back(std::sqrt(lost / size));
  }
  EXPECT_LT(errors[1], 0.02);
  EXPECT_LT(errors[2], 0.02);
}

// Its elements are 0 on all ranks, or on one: it contributes nothing, its residual waits.
TEST(CompressedAllReduce, WhatTookNoPartWaits) {
  const std::string codec = "sym4:bucket=64,nonfinite=poison";
  Ranks ranks(2);
  auto all = sides(2, kShapes);
  newGradients(all, 0);
  ranks.expectRun("all_reduce", [&](int rank, OpContext& op) { all[rank]->run(op, codec, kAverage, true, 0); });
  std::vector<std::vector<std::vector<float>>> before = {all[0]->residuals, all[1]->residuals};
  const auto factors = all[0]->factors;
  for (auto& side : all) {
    for (Bytes& data : side->data)
      std::fill(data.begin(), data.end(), std::byte{0});
  }
  ranks.expectRun("all_reduce", [&](int rank, OpContext& op) { all[rank]->run(op, codec, kAverage, true, 1); });
  expectAlike(all);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(all[rank]->residuals == before[rank]);
    for (size_t t = 0; t < kShapes.size(); ++t) {
      for (double x : numbers(*all[rank], t))
        ASSERT_EQ(x, 0);
    }
  }
  EXPECT_TRUE(all[0]->factors == factors);

  // On rank 1 alone: the law holds for both.
  newGradients(all, 2);
  for (Bytes& data : all[1]->data)
    std::fill(data.begin(), data.end(), std::byte{0});
  std::vector<std::vector<double>> owed;
  for (size_t t = 0; t < kShapes.size(); ++t) {
    owed.push_back(numbers(*all[0], t));
    for (size_t i = 0; i < owed[t].size(); ++i)
      owed[t][i] += double{before[0][t][i]} + before[1][t][i];
  }
  ranks.expectRun("all_reduce", [&](int rank, OpContext& op) { all[rank]->run(op, codec, kAverage, true, 2); });
  expectAlike(all);
  for (size_t t = 0; t < kShapes.size(); ++t) {
    const auto x = numbers(*all[0], t);
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_NEAR(owed[t][i] - 2 * x[i] - all[0]->residuals[t][i] - all[1]->residuals[t][i], 0, 1e-4);
  }
}

// A NaN anywhere: all ranks hear of it, and the next call works.
TEST(CompressedAllReduce, WhatIsNotFiniteReachesEveryRank) {
  for (const std::string codec : {"sym4:bucket=64,nonfinite=poison", "gauss4:nonfinite=poison"}) {
    for (float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      for (size_t spoilt : {size_t{0}, size_t{1}}) {  // with a rank, and without
        for (int from : {0, 1, 2}) {
          Ranks ranks(3);
          auto all = sides(3, kShapes);
          newGradients(all, 0);
          std::memcpy(all[from]->data[spoilt].data() + 77 * sizeof(float), &bad, sizeof bad);
          ranks.expectRun("all_reduce", [&](int rank, OpContext& op) { all[rank]->run(op, codec, kAverage, true, 0); });
          for (const auto& side : all) {
            EXPECT_FALSE(side->finite);
            EXPECT_TRUE(side->data == all[0]->data);
            const auto x = numbers(*side, spoilt);
            EXPECT_FALSE(std::isfinite(x[77]));
            EXPECT_FALSE(std::isfinite(numbers(*side, 0)[0])) << "tensors with a rank are NaN";
          }
          auto others = sides(3, kShapes);
          newGradients(others, 1);
          ranks.expectRun("all_reduce",
                          [&](int rank, OpContext& op) { others[rank]->run(op, codec, kAverage, true, 1); });
          expectAlike(others);
        }
      }
    }
  }
}

// The squared singular values are those of the result, the same on all ranks, which has the same bits without them.
TEST(CompressedAllReduce, MeasuresTheResultsSingularValues) {
  for (int size : {1, 2, 3}) {
    Ranks ranks(size);
    auto all = sides(size, kShapes), without = sides(size, kShapes);
    for (auto& side : all)
      side->measures = true;
    for (uint32_t step = 0; step < 3; ++step) {
      newGradients(all, step);
      newGradients(without, step);
      for (auto* some : {&all, &without}) {
        ranks.expectRun("all_reduce", [&](int rank, OpContext& op) {
          (*some)[rank]->run(op, "sym8:bucket=64,nonfinite=poison", kAverage, /*feedback=*/true, step);
        });
      }
      expectAlike(all);
      EXPECT_TRUE(all[0]->data == without[0]->data);
      for (size_t t = 0; t < kShapes.size(); ++t) {
        const std::vector<double>& energies = all[0]->energies[t];
        EXPECT_EQ(energies.size(), kShapes[t].rank);
        for (const auto& side : all)
          EXPECT_TRUE(side->energies[t] == energies);
        if (energies.empty()) continue;
        const auto x = numbers(*all[0], t);
        const double whole = std::inner_product(x.begin(), x.end(), x.begin(), 0.0);
        EXPECT_NEAR(std::accumulate(energies.begin(), energies.end(), 0.0), whole, 1e-4 * whole);
      }
    }
  }
}

// Two messages, whose payloads are those of P and of R.
TEST(CompressedAllReduce, SendsTheFactorsCodes) {
  Ranks ranks(2);
  const std::vector<Shape> shapes = {{512, 1024, 4}, {256, 512, 4}};
  auto all = sides(2, shapes);
  newGradients(all, 0);
  const auto codec = makeCodec(CodecSpec::parse("sym4:bucket=128,nonfinite=poison"));
  const auto counters = ranks.expectRun(
      "all_reduce", [&](int rank, OpContext& op) { all[rank]->run(op, codec->spec().str(), kAverage, true, 0); });
  size_t codes = 0;
  for (const Shape& s : shapes) {  // each goes out once: for the other rank to sum, or as a sum
    codes += codec->encodedBytes(s.rank * s.rows, DType::float32);
    codes += codec->encodedBytes(s.rank * s.columns, DType::float32);
  }
  for (const OpCounters& c : counters) {
    EXPECT_GE(c.wire_bytes, codes);
    EXPECT_LE(c.wire_bytes, codes + 2048) << "headers, descriptions";
    EXPECT_EQ(c.raw_bytes, (512 * 1024 + 256 * 512) * 4u);
  }
}

TEST(CompressedAllReduce, RefusesARankThatIsNone) {
  Ranks ranks(1);
  for (const Shape& shape : {Shape{4, 8, 4}, Shape{8, 4, 5}}) {
    auto all = sides(1, {shape});
    newGradients(all, 0);
    const auto outcomes = ranks.run(
        "all_reduce", [&](int rank, OpContext& op) { all[rank]->run(op, "sym4:nonfinite=poison", kAverage, true, 0); });
    EXPECT_TRUE(outcomes[0].is<ValueError>());
    EXPECT_TRUE(test::holds(outcomes[0].what(), {"below both sides", std::to_string(shape.rank)}));
  }
  EXPECT_TRUE(isLowRank(256, 1024, 4));
  EXPECT_FALSE(isLowRank(8, 8, 4));
  EXPECT_TRUE(isLowRank(9, 8, 4));
}

}  // namespace
}  // namespace lowcomm
