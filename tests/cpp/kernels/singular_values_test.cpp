#include "kernels/low_rank/low_rank.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/float_env.h"

namespace lowcomm {
namespace {

std::vector<float> noise(size_t n, uint32_t seed) {
  std::vector<float> x(n);
  for (float& one : x) {
    seed = seed * 1664525u + 1013904223u;
    one = static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-31f;
  }
  return x;
}

// R = U·diag(σ)·Vᵀ with orthonormal U and V has the singular values σ, however it is turned.
TEST(SingularValues, AreThoseThatTheMatrixWasMadeOf) {
  const FloatEnv env;
  for (size_t rank : {1, 2, 3, 5, 16, 39}) {
    const size_t columns = 40;
    std::vector<float> u = noise(rank * rank, 1), v = noise(rank * columns, 2);
    ASSERT_EQ(orthonormalise(u.data(), rank, rank), 0u);
    ASSERT_EQ(orthonormalise(v.data(), rank, columns), 0u);
    std::vector<float> r(rank * columns);
    for (size_t i = 0; i < rank; ++i) {
      for (size_t j = 0; j < columns; ++j) {
        double sum = 0;
        for (size_t k = 0; k < rank; ++k)
          sum += static_cast<double>(u[i * rank + k]) * static_cast<double>(rank - k) * v[k * columns + j];
        r[i * columns + j] = static_cast<float>(sum);
      }
    }
    std::vector<double> squares(rank);
    squaredSingularValues(squares.data(), r.data(), rank, columns);
    for (size_t k = 0; k < rank; ++k)
      EXPECT_NEAR(std::sqrt(squares[k]), static_cast<double>(rank - k), 1e-5 * static_cast<double>(rank)) << k;
  }
}

// Σσ² is the squared norm of R, and Σσ⁴ that of its Gram matrix, whatever the spectrum.
TEST(SingularValues, HaveTheMomentsOfTheMatrix) {
  const FloatEnv env;
  const size_t columns = 150;
  for (size_t rank : {4, 7, 64, 130}) {
    for (const double falls : {1.0, 0.8}) {  // of a row from the one before
      std::vector<float> r = noise(rank * columns, 5);
      double scale = 1;
      for (size_t i = 0; i < rank; ++i, scale *= falls) {
        for (size_t k = 0; k < columns; ++k)
          r[i * columns + k] *= static_cast<float>(scale);
      }
      double second = 0, fourth = 0;
      for (size_t i = 0; i < rank; ++i) {
        for (size_t j = 0; j < rank; ++j) {
          double sum = 0;
          for (size_t k = 0; k < columns; ++k)
            sum += static_cast<double>(r[i * columns + k]) * r[j * columns + k];
          fourth += sum * sum;
          if (i == j) second += sum;
        }
      }
      std::vector<double> squares(rank);
      squaredSingularValues(squares.data(), r.data(), rank, columns);
      for (size_t k = 1; k < rank; ++k)
        EXPECT_GE(squares[k - 1], squares[k]);
      double first = 0, both = 0;
      for (double square : squares) {
        first += square;
        both += square * square;
      }
      EXPECT_NEAR(first / second, 1, 1e-12) << rank;
      EXPECT_NEAR(both / fourth, 1, 1e-12) << rank;
    }
  }
}

TEST(SingularValues, OfDependentRowsAndOfNothing) {
  const FloatEnv env;
  const std::vector<float> row = noise(30, 3);
  std::vector<float> r;
  for (int i = 0; i < 4; ++i)
    r.insert(r.end(), row.begin(), row.end());
  std::vector<double> squares(4);
  squaredSingularValues(squares.data(), r.data(), 4, 30);
  double length = 0;
  for (float x : row)
    length += static_cast<double>(x) * x;
  EXPECT_NEAR(squares[0], 4 * length, 1e-12 * length);
  EXPECT_NEAR(squares[1], 0, 1e-12 * length);
  EXPECT_EQ(effectiveRank(squares.data(), 4, 0.95), 1u);

  const std::vector<float> zero(4 * 30);
  squaredSingularValues(squares.data(), zero.data(), 4, 30);
  EXPECT_EQ(squares, std::vector<double>(4));
  EXPECT_EQ(effectiveRank(squares.data(), 4, 0.95), 0u);
}

TEST(SingularValues, EffectiveRankIsTheLeastWithTheEnergy) {
  const std::vector<double> squares = {8, 1, 0.5, 0.5};
  EXPECT_EQ(effectiveRank(squares.data(), 4, 0.5), 1u);
  EXPECT_EQ(effectiveRank(squares.data(), 4, 0.8), 1u);
  EXPECT_EQ(effectiveRank(squares.data(), 4, 0.81), 2u);
  EXPECT_EQ(effectiveRank(squares.data(), 4, 0.95), 3u);
  EXPECT_EQ(effectiveRank(squares.data(), 4, 1.0), 4u);
}

}  // namespace
}  // namespace lowcomm
