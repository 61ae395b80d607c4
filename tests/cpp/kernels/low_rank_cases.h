#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <vector>

#include "base/float_env.h"
#include "grid_cases.h"
#include "kernels/low_rank/low_rank.h"

namespace lowcomm::test {

struct Sizes {
  size_t rows, columns, rank;
};

// Around every block of rows, of columns and of factors, and shapes that people have.
inline const std::vector<Sizes> kLowRankSizes = {{1, 1, 1},     {2, 3, 1},     {5, 15, 2},   {7, 16, 3},   {8, 17, 4},
                                                 {9, 31, 5},    {16, 33, 4},   {64, 48, 7},  {33, 64, 8},  {3, 1025, 2},
                                                 {1025, 3, 2},  {96, 128, 16}, {61, 257, 9}, {37, 80, 16}, {37, 80, 17},
                                                 {70, 150, 65}, {32, 64, 64}};

// Everything a form makes of one matrix: P, R, P·Rᵀ, A − P·Rᵀ, and that in the matrix's own place.
inline std::array<std::vector<float>, 5> products(const LowRankKernels& loops, const Sizes& s) {
  const std::vector<float> a = normal(s.rows * s.columns, 1), q = normal(s.rank * s.columns, 2);
  std::vector<float> p(s.rank * s.rows, -9), r(s.rank * s.columns, -9), out(a.size(), -9), left(a.size(), -9);
  std::vector<float> in_place = a;
  FloatEnv env;
  loops.project(p.data(), a.data(), q.data(), s.rows, s.columns, s.rank);
  loops.back_project(r.data(), a.data(), p.data(), s.rows, s.columns, s.rank);
  loops.expand(out.data(), p.data(), r.data(), s.rows, s.columns, s.rank);
  loops.subtract(left.data(), a.data(), p.data(), r.data(), s.rows, s.columns, s.rank);
  loops.subtract(in_place.data(), in_place.data(), p.data(), r.data(), s.rows, s.columns, s.rank);
  return {p, r, out, left, in_place};
}

inline void expectScalarsProducts(const LowRankKernels& loops, const char* name) {
  for (const Sizes& s : kLowRankSizes) {
    const auto reference = products(scalar::kLowRank, s), got = products(loops, s);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(std::memcmp(got[i].data(), reference[i].data(), got[i].size() * sizeof(float)), 0)
          << name << ", product " << i << " of " << s.rows << " x " << s.columns << ", rank " << s.rank;
    }
  }
}

}  // namespace lowcomm::test
