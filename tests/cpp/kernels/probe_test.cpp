#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/float_env.h"
#include "grid_cases.h"
#include "kernels/isa/table.h"
#include "kernels/low_rank/low_rank.h"
#include "kernels/low_rank/signs.h"

namespace lowcomm {
namespace {

using test::normal;

// A matrix and factors that miss most of it.
struct Factored {
  static constexpr size_t kRows = 37, kColumns = 53, kRank = 3;

  explicit Factored(uint32_t seed) : a(normal(kRows * kColumns, seed)), r(kRank * kColumns) {
    const FloatEnv env;
    kernels().low_rank->back_project(r.data(), a.data(), basis().data(), kRows, kColumns, kRank);
  }

  static std::vector<float> basis() {
    const FloatEnv env;
    std::vector<float> p = normal(kRank * kRows, 99);
    orthonormalise(p.data(), kRank, kRows);
    return p;
  }

  std::vector<float> probes(uint64_t seed) const {
    const FloatEnv env;
    std::vector<float> out(kProbes, -9), omega(kColumns), sums(kRows);
    drawSigns(omega.data(), kColumns, seed);
    kernels().low_rank->project(sums.data(), a.data(), omega.data(), kRows, kColumns, 1);
    probeRest(out.data(), sums.data(), omega.data(), basis().data(), r.data(), kRows, kColumns, kRank, seed);
    return out;
  }

  double rest() const {
    const FloatEnv env;
    std::vector<float> left(a.size());
    kernels().low_rank->subtract(left.data(), a.data(), basis().data(), r.data(), kRows, kColumns, kRank);
    double sum = 0;
    for (float x : left)
      sum += double{x} * x;
    return sum;
  }

  std::vector<float> a, r;
};

double squaresOf(const std::vector<float>& x) {
  double sum = 0;
  for (float one : x)
    sum += double{one} * one;
  return sum;
}

TEST(ProbeRest, HasTheRestAsItsMean) {
  const Factored one(1);
  constexpr int kSeeds = 1000;
  double mean = 0, square = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    const double estimate = squaresOf(one.probes(static_cast<uint64_t>(seed))) / one.rest();
    mean += estimate / kSeeds;
    square += estimate * estimate / kSeeds;
  }
  const double deviation = std::sqrt(2.0 / kProbes);
  EXPECT_NEAR(mean, 1, 4 * deviation / std::sqrt(kSeeds));
  EXPECT_NEAR(std::sqrt(square - mean * mean), deviation, 0.2 * deviation);
}

// Of ranks together it is the rest of their sum, which may be next to nothing where each one's is not.
TEST(ProbeRest, AddsUpOverRanks) {
  const Factored one(1), two(2);
  Factored both(1), opposite(1);
  for (size_t i = 0; i < both.a.size(); ++i) {
    both.a[i] += two.a[i];
    opposite.a[i] *= -1;
  }
  for (size_t i = 0; i < both.r.size(); ++i) {
    both.r[i] += two.r[i];
    opposite.r[i] *= -1;
  }
  const auto x = one.probes(5), y = two.probes(5), z = both.probes(5), against = opposite.probes(5);
  for (size_t k = 0; k < kProbes; ++k) {
    EXPECT_NEAR(x[k] + y[k], z[k], 1e-3);
    EXPECT_EQ(x[k] + against[k], 0);
    EXPECT_GT(std::fabs(x[k]), 1e-3);
  }
}

TEST(ProbeRest, OfAWholeProductIsNothing) {
  Factored one(1);
  const FloatEnv env;
  kernels().low_rank->expand(one.a.data(), Factored::basis().data(), one.r.data(), Factored::kRows, Factored::kColumns,
                             Factored::kRank);
  EXPECT_LT(squaresOf(one.probes(3)), 1e-9 * squaresOf(one.r));
}

// A spectrum that falls by one ratio is found whole, however few of its values are known.
TEST(EffectiveRank, GoesOnWhereTheKnownValuesEnd) {
  constexpr size_t kAll = 60;
  for (double falls : {0.5, 0.8, 0.95}) {
    std::vector<double> squares;
    for (double x = 7; squares.size() < kAll; x *= falls)
      squares.push_back(x);
    for (double energy : {0.3, 0.9, 0.95}) {
      const double infinite = squares[0] / (1 - falls);  // the sum of all, without end
      size_t whole = 0;
      for (double part = 0; part < energy * infinite; ++whole)
        part += squares[whole];
      for (size_t known : {1, 2, 5, 40}) {
        double rest = infinite;
        for (size_t i = 0; i < known; ++i)
          rest -= squares[i];
        EXPECT_NEAR(static_cast<double>(effectiveRank(squares.data(), known, energy, rest, kAll)),
                    static_cast<double>(whole), 1)
            << falls << ", " << energy << ", " << known;
      }
    }
  }
}

TEST(EffectiveRank, StaysWithinItsBound) {
  const std::vector<double> squares = {4, 3, 2, 1};
  EXPECT_EQ(effectiveRank(squares.data(), 4, 0.95, 0, 9), 4u);
  EXPECT_EQ(effectiveRank(squares.data(), 4, 0.95, 0.5, 9), 4u) << "they have enough";
  EXPECT_EQ(effectiveRank(squares.data(), 4, 0.95, 1, 9), 5u) << "a half each";
  EXPECT_EQ(effectiveRank(squares.data(), 4, 0.95, 100, 9), 9u);
  EXPECT_EQ(effectiveRank(squares.data(), 4, 0.95, 100, 3), 3u);
  for (double rest : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    EXPECT_EQ(effectiveRank(squares.data(), 4, 0.95, rest, 9), 9u);
  const std::vector<double> none(4);
  EXPECT_EQ(effectiveRank(none.data(), 4, 0.95, 0, 9), 0u);
  EXPECT_EQ(effectiveRank(none.data(), 4, 0.95, 1, 9), 9u) << "factors that caught nothing";
}

}  // namespace
}  // namespace lowcomm
