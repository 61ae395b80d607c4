// The loops of low_rank.cpp on the vectors of lanes.inl, compiled once an instruction set. Blocks of rows and of
// columns only change what is kept in registers: every sum has the order that low_rank.h states.

#include <cstddef>
#include <cstdint>

#include "kernels/isa/table.h"
#include "kernels/low_rank/low_rank.h"
//
#include "kernels/isa/lanes.inl"

namespace lowcomm {
namespace {

constexpr size_t kPartials = 16;
// Sums that are under way at once: enough to hide an addition's latency, few enough for 16 registers, or 32.
constexpr size_t kBlockRows = kLanes == 16 ? 4 : 2;
constexpr size_t kBlockRank = kLanes == 16 ? 4 : 2;
constexpr size_t kRowsARead = 8;  // back_project: of `a` a visit to r

LOWCOMM_INLINE float folded(const Floats* partials, const float* tail_a, const float* tail_q, size_t tail) {
  float s[kPartials];
  for (int v = 0; v < kRegistersARow; ++v)
    store(s + v * kLanes, partials[v]);
  for (size_t l = 0; l < tail; ++l)
    s[l] += tail_a[l] * tail_q[l];
  for (size_t h = kPartials / 2; h > 0; h /= 2) {
    for (size_t l = 0; l < h; ++l)
      s[l] += s[l + h];
  }
  return s[0];
}

template <size_t kRows, size_t kRank>
LOWCOMM_INLINE void projectBlock(float* p, const float* a, const float* q, size_t rows, size_t columns) {
  Floats sums[kRows][kRank][kRegistersARow] = {};
  const size_t whole = columns / kPartials * kPartials;
  for (size_t j = 0; j < whole; j += kPartials) {
    for (int v = 0; v < kRegistersARow; ++v) {
      Floats x[kRows];
      for (size_t i = 0; i < kRows; ++i)
        x[i] = load(a + i * columns + j + v * kLanes);
      for (size_t k = 0; k < kRank; ++k) {
        const Floats y = load(q + k * columns + j + v * kLanes);
        for (size_t i = 0; i < kRows; ++i)
          sums[i][k][v] += x[i] * y;
      }
    }
  }
  for (size_t i = 0; i < kRows; ++i) {
    for (size_t k = 0; k < kRank; ++k)
      p[k * rows + i] = folded(sums[i][k], a + i * columns + whole, q + k * columns + whole, columns - whole);
  }
}

template <size_t kRows>
LOWCOMM_INLINE void projectRows(float* p, const float* a, const float* q, size_t rows, size_t columns, size_t rank) {
  size_t k = 0;
  for (; k + kBlockRank <= rank; k += kBlockRank)
    projectBlock<kRows, kBlockRank>(p + k * rows, a, q + k * columns, rows, columns);
  for (; k < rank; ++k)
    projectBlock<kRows, 1>(p + k * rows, a, q + k * columns, rows, columns);
}

void project(float* p, const float* a, const float* q, size_t rows, size_t columns, size_t rank) {
  size_t i = 0;
  for (; i + kBlockRows <= rows; i += kBlockRows)
    projectRows<kBlockRows>(p + i, a + i * columns, q, rows, columns, rank);
  for (; i < rows; ++i)
    projectRows<1>(p + i, a + i * columns, q, rows, columns, rank);
}

// Adds kRows rows of `a`, kRank factors at a time: the sums of one factor wait for one another, those of others do not.
template <size_t kRows, size_t kRank>
LOWCOMM_INLINE void backProjectBlock(float* r, const float* a, const float* p, size_t rows, size_t columns) {
  size_t j = 0;
  for (; j + kLanes <= columns; j += kLanes) {
    Floats sums[kRank];
    for (size_t k = 0; k < kRank; ++k)
      sums[k] = load(r + k * columns + j);
    for (size_t i = 0; i < kRows; ++i) {
      const Floats x = load(a + i * columns + j);
      for (size_t k = 0; k < kRank; ++k)
        sums[k] += x * splat(p[k * rows + i]);
    }
    for (size_t k = 0; k < kRank; ++k)
      store(r + k * columns + j, sums[k]);
  }
  for (; j < columns; ++j) {
    for (size_t k = 0; k < kRank; ++k) {
      for (size_t i = 0; i < kRows; ++i)
        r[k * columns + j] += a[i * columns + j] * p[k * rows + i];
    }
  }
}

template <size_t kRows>
LOWCOMM_INLINE void backProjectRows(float* r, const float* a, const float* p, size_t rows, size_t columns,
                                    size_t rank) {
  size_t k = 0;
  for (; k + 4 <= rank; k += 4)
    backProjectBlock<kRows, 4>(r + k * columns, a, p + k * rows, rows, columns);
  for (; k < rank; ++k)
    backProjectBlock<kRows, 1>(r + k * columns, a, p + k * rows, rows, columns);
}

void backProject(float* r, const float* a, const float* p, size_t rows, size_t columns, size_t rank) {
  __builtin_memset(r, 0, rank * columns * sizeof(float));
  size_t i = 0;
  for (; i + kRowsARead <= rows; i += kRowsARead)
    backProjectRows<kRowsARead>(r, a + i * columns, p + i, rows, columns, rank);
  for (; i < rows; ++i)
    backProjectRows<1>(r, a + i * columns, p + i, rows, columns, rank);
}

template <bool kSubtract, size_t kRows>
LOWCOMM_INLINE void combineRows(float* out, const float* a, const float* p, const float* r, size_t rows, size_t columns,
                                size_t rank) {
  size_t j = 0;
  for (; j + kPartials <= columns; j += kPartials) {
    Floats sums[kRows][kRegistersARow] = {};
    for (size_t k = 0; k < rank; ++k) {
      for (int v = 0; v < kRegistersARow; ++v) {
        const Floats y = load(r + k * columns + j + v * kLanes);
        for (size_t i = 0; i < kRows; ++i)
          sums[i][v] += splat(p[k * rows + i]) * y;
      }
    }
    for (size_t i = 0; i < kRows; ++i) {
      for (int v = 0; v < kRegistersARow; ++v) {
        const size_t at = i * columns + j + v * kLanes;
        store(out + at, kSubtract ? load(a + at) - sums[i][v] : sums[i][v]);
      }
    }
  }
  for (; j < columns; ++j) {
    for (size_t i = 0; i < kRows; ++i) {
      float sum = 0;
      for (size_t k = 0; k < rank; ++k)
        sum += p[k * rows + i] * r[k * columns + j];
      out[i * columns + j] = kSubtract ? a[i * columns + j] - sum : sum;
    }
  }
}

template <bool kSubtract>
void combineAll(float* out, const float* a, const float* p, const float* r, size_t rows, size_t columns, size_t rank) {
  constexpr size_t kRows = 4;
  size_t i = 0;
  for (; i + kRows <= rows; i += kRows)
    combineRows<kSubtract, kRows>(out + i * columns, kSubtract ? a + i * columns : nullptr, p + i, r, rows, columns,
                                  rank);
  for (; i < rows; ++i)
    combineRows<kSubtract, 1>(out + i * columns, kSubtract ? a + i * columns : nullptr, p + i, r, rows, columns, rank);
}

void expand(float* out, const float* p, const float* r, size_t rows, size_t columns, size_t rank) {
  combineAll<false>(out, nullptr, p, r, rows, columns, rank);
}

}  // namespace
}  // namespace lowcomm

// A form's table of them.
#define LOWCOMM_LOW_RANK_FORM(form)                                                     \
  namespace lowcomm::form {                                                             \
  constexpr LowRankKernels kLowRank = {project, backProject, expand, combineAll<true>}; \
  }
