// A basis that every stage makes for itself; tests/python/subspace/test_subspace_boundary.py has its bits.
#include "pipeline/subspace.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace lowcomm {
namespace {

TEST(Subspace, ABasisIsOrthonormal) {
  for (const auto& [rank, width] :
       std::vector<std::pair<size_t, size_t>>{{1, 1}, {1, 7}, {10, 64}, {64, 64}, {40, 1000}}) {
    std::vector<double> rows(rank * width);
    drawBasis(rows.data(), rank, width, 3);
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

}  // namespace
}  // namespace lowcomm
