// Numbers that every stage of a subspace-constrained pipeline makes for itself: the same bits on every machine.
#include "pipeline/subspace.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/hashes.h"
#include "errors.h"

namespace lowcomm {
namespace {

std::vector<double> basis(size_t rank, size_t width, uint64_t seed) {
  std::vector<double> rows(rank * width);
  drawBasis(rows.data(), rank, width, seed);
  return rows;
}

TEST(Subspace, ABasisIsOrthonormal) {
  for (const auto& [rank, width] :
       std::vector<std::pair<size_t, size_t>>{{1, 1}, {1, 7}, {10, 64}, {64, 64}, {40, 1000}}) {
    const std::vector<double> rows = basis(rank, width, 3);
    for (size_t i = 0; i < rank; ++i) {
      for (size_t j = 0; j <= i; ++j) {
        double product = 0;
        for (size_t e = 0; e < width; ++e)
          product += rows[i * width + e] * rows[j * width + e];
        EXPECT_NEAR(product, i == j ? 1.0 : 0.0, 1e-11) << rank << " of " << width << ": " << i << ", " << j;
      }
    }
  }
}

// FORMAT.md's known answers: other bits are another basis, and stages of two machines would differ.
TEST(Subspace, KnownAnswers) {
  const std::vector<double> rows = basis(3, 40, 7);
  EXPECT_EQ(crc32c(rows.data(), rows.size() * sizeof(double)), 116592363u);
  std::vector<float> row(100);
  addTokenSigns(row.data(), nullptr, 1234, {7, 0.5f, row.size()}, 1.0f);
  EXPECT_EQ(crc32c(row.data(), row.size() * sizeof(float)), 3042541351u);
  addTokenNormals(row.data(), nullptr, 1234, {7, 0.5f, row.size()}, 1.0f);
  EXPECT_EQ(crc32c(row.data(), row.size() * sizeof(float)), 2481941212u);
}

TEST(Subspace, AnotherSeedOrTokenIsAnother) {
  EXPECT_NE(basis(3, 40, 7), basis(3, 40, 8));
  const auto row = [](uint64_t seed, uint64_t token) {
    std::vector<float> x(256);
    addTokenSigns(x.data(), nullptr, token, {seed, 1.0f, x.size()}, 1.0f);
    return x;
  };
  EXPECT_NE(row(1, 5), row(1, 6));
  EXPECT_NE(row(1, 5), row(2, 5));
  EXPECT_EQ(row(1, kMostTokens - 1), row(1, kMostTokens - 1));
}

TEST(Subspace, TokenRowsAreAddedAndTakenAway) {
  for (size_t width : {1u, 15u, 64u, 100u, 2048u, 3000u}) {
    std::vector<float> x(width), y(width), z(width), back(width);
    for (size_t i = 0; i < width; ++i)
      x[i] = static_cast<float>(i) * 0.25f;
    const TokenSigns signs{9, 0.5f, width};  // sums of quarters are exact
    addTokenSigns(z.data(), nullptr, 77, signs, 1.0f);
    addTokenSigns(y.data(), x.data(), 77, signs, 1.0f);
    addTokenSigns(back.data(), y.data(), 77, signs, -1.0f);
    for (size_t i = 0; i < width; ++i) {
      EXPECT_EQ(std::abs(z[i]), 0.5f);
      EXPECT_EQ(y[i], x[i] + z[i]);
    }
    EXPECT_EQ(back, x);
    addTokenSigns(x.data(), x.data(), 77, signs, 1.0f);  // in place
    EXPECT_EQ(x, y);
  }
}

TEST(Subspace, RefusesARankThatIsNone) {
  for (size_t rank : {0u, 9u}) {
    std::vector<double> rows(9 * 8);
    const auto draw = [&] { drawBasis(rows.data(), rank, 8, 0); };
    EXPECT_TRUE(test::holds(test::thrownBy<ValueError>(draw), {"expected 1...8"})) << rank;
  }
}

}  // namespace
}  // namespace lowcomm
