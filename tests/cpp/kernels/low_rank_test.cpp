#include "kernels/low_rank/low_rank.h"

#include <gtest/gtest.h>

#include <cmath>

#include "low_rank_cases.h"

namespace lowcomm {
namespace {

using test::products;
using test::Sizes;

TEST(LowRank, EveryFormGivesScalarsBits) {
  for (const KernelTable* form : test::allForms())
    test::expectScalarsProducts(*form->low_rank, form->name);
}

// Each element is within the rounding of its sum of the product in fp64.
TEST(LowRank, ProductsAreTheProducts) {
  for (const Sizes& s : test::kLowRankSizes) {
    const std::vector<float> a = test::normal(s.rows * s.columns, 1), q = test::normal(s.rank * s.columns, 2);
    const auto [p, r, out, left, in_place] = products(scalar::kLowRank, s);
    for (size_t k = 0; k < s.rank; ++k) {
      for (size_t i = 0; i < s.rows; ++i) {
        double sum = 0, size = 0;
        for (size_t j = 0; j < s.columns; ++j) {
          sum += double{a[i * s.columns + j]} * q[k * s.columns + j];
          size += std::abs(double{a[i * s.columns + j]} * q[k * s.columns + j]);
        }
        ASSERT_NEAR(p[k * s.rows + i], sum, size * s.columns * 0x1p-24);
      }
      for (size_t j = 0; j < s.columns; ++j) {
        double sum = 0, size = 0;
        for (size_t i = 0; i < s.rows; ++i) {
          sum += double{a[i * s.columns + j]} * p[k * s.rows + i];
          size += std::abs(double{a[i * s.columns + j]} * p[k * s.rows + i]);
        }
        ASSERT_NEAR(r[k * s.columns + j], sum, size * (s.rows + 1) * 0x1p-24);
      }
    }
    for (size_t i = 0; i < s.rows; ++i) {
      for (size_t j = 0; j < s.columns; ++j) {
        double sum = 0, size = 0;
        for (size_t k = 0; k < s.rank; ++k) {
          sum += double{p[k * s.rows + i]} * r[k * s.columns + j];
          size += std::abs(double{p[k * s.rows + i]} * r[k * s.columns + j]);
        }
        const size_t at = i * s.columns + j;
        ASSERT_NEAR(out[at], sum, size * (s.rank + 1) * 0x1p-24);
        EXPECT_EQ(left[at], a[at] - out[at]);
        EXPECT_EQ(in_place[at], left[at]);
      }
    }
  }
}

}  // namespace
}  // namespace lowcomm
