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
        sums[k] += x * p[k * rows + i];
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

// Sums of 4 rows that are under way at once: as many as the registers hold next to a row of R.
constexpr size_t kTileRows = 4, kTileVectors = kLanes == 8 ? 2 : 4, kPanel = kTileVectors * kLanes;
// The numbers that combine() visits again and again stay in the first cache, with the columns of a panel next to one
// another: in place they are a power of two apart in many matrices, and push one another out.
constexpr size_t kStripRows = 32, kStripRank = 64, kFew = 16;

// Not memcpy, which GCC makes a slow instruction of here.
LOWCOMM_INLINE void copyRow(float* out, const float* from, size_t count) {
  size_t j = 0;
  for (; j + kLanes <= count; j += kLanes)
    store(out + j, load(from + j));
  for (; j < count; ++j)
    out[j] = from[j];
}

template <bool kSubtract>
LOWCOMM_INLINE void putRow(float* out, const float* a, const float* sums, size_t count) {
  size_t j = 0;
  for (; j + kLanes <= count; j += kLanes)
    store(out + j, kSubtract ? load(a + j) - load(sums + j) : load(sums + j));
  for (; j < count; ++j)
    out[j] = kSubtract ? a[j] - sums[j] : sums[j];
}

// P·Rᵀ of kTileRows rows, added to `sums` if it is given. `p` is [rank, kStripRows], `r` is [rank, stride].
template <size_t kVectors>
LOWCOMM_INLINE void combineTile(Floats (*tile)[kVectors], const float* sums, const float* p, const float* r,
                                size_t stride, size_t rank) {
  for (size_t i = 0; i < kTileRows; ++i) {
    for (size_t v = 0; v < kVectors; ++v)
      tile[i][v] = sums ? load(sums + i * kPanel + v * kLanes) : Floats{};
  }
  for (size_t k = 0; k < rank; ++k) {
    Floats y[kVectors];
    for (size_t v = 0; v < kVectors; ++v)
      y[v] = load(r + k * stride + v * kLanes);
    for (size_t i = 0; i < kTileRows; ++i) {
      for (size_t v = 0; v < kVectors; ++v)
        tile[i][v] += p[k * kStripRows + i] * y[v];
    }
  }
}

template <size_t kVectors>
LOWCOMM_INLINE void sumTile(float* sums, const float* p, const float* r, size_t rank, bool first) {
  Floats tile[kTileRows][kVectors];
  combineTile<kVectors>(tile, first ? nullptr : sums, p, r, kPanel, rank);
  for (size_t i = 0; i < kTileRows; ++i) {
    for (size_t v = 0; v < kVectors; ++v)
      store(sums + i * kPanel + v * kLanes, tile[i][v]);
  }
}

// A whole panel of kTileRows rows of the result, which end with this rank.
template <bool kSubtract>
LOWCOMM_INLINE void putTile(float* out, const float* a, size_t columns, const float* sums, const float* p,
                            const float* r, size_t stride, size_t rank) {
  Floats tile[kTileRows][kTileVectors];
  combineTile<kTileVectors>(tile, sums, p, r, stride, rank);
  // All are read before one is written: addresses a page apart look the same to the processor.
  for (size_t i = 0; i < kTileRows && kSubtract; ++i) {
    for (size_t v = 0; v < kTileVectors; ++v)
      tile[i][v] = load(a + i * columns + v * kLanes) - tile[i][v];
  }
  for (size_t i = 0; i < kTileRows; ++i) {
    for (size_t v = 0; v < kTileVectors; ++v)
      store(out + i * columns + v * kLanes, tile[i][v]);
  }
}

// Numbers past the last row and column only enter sums that are not read.
template <bool kSubtract>
void combineAll(float* out, const float* a, const float* p, const float* r, size_t rows, size_t columns, size_t rank) {
  float sums[kStripRows * kPanel], strip[kStripRank * kStripRows] = {}, panel[kStripRank * kPanel] = {};
  const auto least = [](size_t x, size_t y) { return x < y ? x : y; };
  // Few columns of R stay in the cache where they are, and rows are then written from end to end.
  const bool few = rank <= kFew;
  const size_t step = few ? kTileRows : kStripRows;
  for (size_t i = 0; i < rows; i += step) {
    const size_t high = least(step, rows - i);
    for (size_t j = 0; j < columns; j += kPanel) {
      const size_t wide = least(kPanel, columns - j);
      const bool in_place = few && wide == kPanel && high == step;
      for (size_t k = 0; k < rank; k += kStripRank) {
        const size_t deep = least(kStripRank, rank - k);
        if (j == 0 || rank > kStripRank) {
          for (size_t d = 0; d < deep; ++d)
            copyRow(strip + d * kStripRows, p + (k + d) * rows + i, high);
        }
        for (size_t d = 0; d < deep && !in_place; ++d)
          copyRow(panel + d * kPanel, r + (k + d) * columns + j, wide);
        for (size_t d = 0; d < high; d += kTileRows) {
          float* of_rows = sums + d * kPanel;
          const size_t at = (i + d) * columns + j;
          const float* from = kSubtract ? a + at : nullptr;
          if (wide < kPanel) {
            for (size_t c = 0; c < wide; c += kLanes)
              sumTile<1>(of_rows + c, strip + d, panel + c, deep, k == 0);
          } else if (k + deep < rank || d + kTileRows > high) {
            sumTile<kTileVectors>(of_rows, strip + d, panel, deep, k == 0);
          } else {
            putTile<kSubtract>(out + at, from, columns, k == 0 ? nullptr : of_rows, strip + d, in_place ? r + j : panel,
                               in_place ? columns : kPanel, deep);
            continue;
          }
          for (size_t row = 0; row < least(kTileRows, high - d) && k + deep == rank; ++row) {
            const size_t more = row * columns;
            putRow<kSubtract>(out + at + more, kSubtract ? from + more : nullptr, of_rows + row * kPanel, wide);
          }
        }
      }
    }
  }
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
