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

// Within the rounding of `terms` additions in fp32 of the sum in fp64 of term(0), …, term(count - 1).
template <typename Term>
void expectSum(float got, size_t count, size_t terms, Term term) {
  double sum = 0, size = 0;
  for (size_t i = 0; i < count; ++i) {
    sum += term(i);
    size += std::abs(term(i));
  }
  ASSERT_NEAR(got, sum, size * terms * 0x1p-24);
}

TEST(LowRank, ProductsAreTheProducts) {
  for (const Sizes& s : test::kLowRankSizes) {
    const std::vector<float> a = test::normal(s.rows * s.columns, 1), q = test::normal(s.rank * s.columns, 2);
    const auto [p_, r_, out_, left, in_place] = products(scalar::kLowRank, s);
    const auto &p = p_, &r = r_, &out = out_;
    for (size_t k = 0; k < s.rank; ++k) {
      for (size_t i = 0; i < s.rows; ++i)
        expectSum(p[k * s.rows + i], s.columns, s.columns,
                  [&](size_t j) { return double{a[i * s.columns + j]} * q[k * s.columns + j]; });
      for (size_t j = 0; j < s.columns; ++j)
        expectSum(r[k * s.columns + j], s.rows, s.rows + 1,
                  [&](size_t i) { return double{a[i * s.columns + j]} * p[k * s.rows + i]; });
    }
    for (size_t i = 0; i < s.rows; ++i) {
      for (size_t j = 0; j < s.columns; ++j) {
        const size_t at = i * s.columns + j;
        expectSum(out[at], s.rank, s.rank + 1,
                  [&](size_t k) { return double{p[k * s.rows + i]} * r[k * s.columns + j]; });
        EXPECT_EQ(left[at], a[at] - out[at]);
        EXPECT_EQ(in_place[at], left[at]);
      }
    }
  }
}

}  // namespace
}  // namespace lowcomm
