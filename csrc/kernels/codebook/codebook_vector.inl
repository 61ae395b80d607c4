// The loops of codebooks, which are grid loops with a book, and of the rotation, compiled once an instruction set.
#include <cstddef>
#include <cstdint>

#include "kernels/codebook/codebook.h"
#include "kernels/isa/table.h"
//
#include "kernels/grid/grid_vector.inl"

// The rotation of codebook.cpp.
//
// A lane's 32 rows are more than most instruction sets have registers, so its five stages of butterflies are taken as
// three within 8 neighbouring rows and then two across rows 8 apart, by way of the first-level cache; of fewer rows the
// first ones of these. Stages across the lanes of a row follow in registers. The order of the stages, and so the bytes,
// is the format's.

namespace lowcomm {
namespace {

// Row by row of a block, 0x80000000 where the sign changes.
struct RotationMasks {
  alignas(64) uint32_t row[32][16];
};

consteval RotationMasks rotationMasks() {
  RotationMasks masks{};
  for (int row = 0; row < 32; ++row) {
    for (int lane = 0; lane < 16; ++lane)
      masks.row[row][lane] = kRotationSigns[lane] >> row << 31;
  }
  return masks;
}

constexpr RotationMasks kRotationMasks = rotationMasks();

template <int kCount>
LOWCOMM_INLINE void butterflies(Floats (&v)[kCount]) {
#pragma GCC unroll 4
  for (int h = 1; h < kCount; h *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      if (i & h) continue;
      const Floats a = v[i], b = v[i + h];
      v[i] = a + b;
      v[i + h] = a - b;
    }
  }
}

// `turn`: turnOf() in every lane.
LOWCOMM_INLINE Floats withSigns(Floats v, int row, size_t lane, Words turn) {
  return (Floats)((Words)v ^ loadWords(&kRotationMasks.row[row][lane]) ^ (turn << (31 - row) & ~kMagnitude));
}

// The numbers of a register's lanes, as template arguments.
template <int... kLane>
struct LaneNumbers {};
template <int kCount, int... kLane>
struct NumbersTo : NumbersTo<kCount - 1, kCount - 1, kLane...> {};
template <int... kLane>
struct NumbersTo<0, kLane...> {
  using Lanes = LaneNumbers<kLane...>;
};

template <int kApart, int... kLane>
LOWCOMM_INLINE Floats withLanesApart(Floats v, LaneNumbers<kLane...>) {
#ifdef __clang__
  const Floats other = __builtin_shufflevector(v, v, (kLane ^ kApart)...);
#else
  const Floats other = __builtin_shuffle(v, Words{(kLane ^ kApart)...});
#endif
#ifdef __AVX512F__  // a product by 1 or -1 is exact: rounded once, as a sum is
  return (Floats)_mm512_fmadd_ps((__m512)v, (__m512)Floats{(kLane & kApart ? -1.0f : 1.0f)...}, (__m512)other);
#else
  return other + (Floats)((Words)v ^ Words{((kLane & kApart) != 0) * ~kMagnitude...});
#endif
}

// The stages across the lanes of a row.
LOWCOMM_INLINE void acrossLanes(Floats (&row)[kRegistersARow]) {
  constexpr NumbersTo<kLanes>::Lanes kEach;
#pragma GCC unroll 4
  for (Floats& v : row) {
    v = withLanesApart<2>(withLanesApart<1>(v, kEach), kEach);
    if constexpr (kLanes > 4) v = withLanesApart<4>(v, kEach);
    if constexpr (kLanes > 8) v = withLanesApart<8>(v, kEach);
  }
  butterflies(row);
}

// The first stages of a block's rotation, of what `from(row)` gives for the lanes from `lane` on, into y.
template <int kRows, class From>
LOWCOMM_INLINE void nearStages(float* y, size_t lane, const From& from) {
  constexpr int kNear = kRows < 8 ? kRows : 8;
#pragma GCC unroll 4
  for (int first = 0; first < 32; first += kNear) {
    Floats v[kNear];
#pragma GCC unroll 8
    for (int i = 0; i < kNear; ++i)
      v[i] = from(first + i);
    butterflies(v);
#pragma GCC unroll 8
    for (int i = 0; i < kNear; ++i)
      store(y + 16 * (first + i) + lane, v[i]);
  }
}

// The last ones, of x: calls take(row, lane, values), which may change that row of x.
template <int kRows, bool kUnits, class Take>
LOWCOMM_INLINE void farStages(const float* x, const Take& take) {
  constexpr int kNear = kRows < 8 ? kRows : 8, kFar = kRows / kNear;
  for (int at = 0; at < 32 / kFar; ++at) {
    const int first = at / kNear * kRows + at % kNear;
    Floats v[kRegistersARow][kFar];
#pragma GCC unroll 4
    for (int part = 0; part < kRegistersARow; ++part) {
#pragma GCC unroll 4
      for (int i = 0; i < kFar; ++i)
        v[part][i] = load(x + 16 * (first + kNear * i) + part * kLanes);
      butterflies(v[part]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kFar; ++i) {
      Floats row[kRegistersARow];
#pragma GCC unroll 4
      for (int part = 0; part < kRegistersARow; ++part)
        row[part] = v[part][i] * rotationScale(kRows, kUnits);
      if constexpr (kUnits) acrossLanes(row);
#pragma GCC unroll 4
      for (int part = 0; part < kRegistersARow; ++part)
        take(first + kNear * i, static_cast<size_t>(part) * kLanes, row[part]);
    }
  }
}

template <int kRows, class Take>
LOWCOMM_INLINE void farStages(const float* x, bool units, const Take& take) {
  units ? farStages<kRows, true>(x, take) : farStages<kRows, false>(x, take);
}

// Returns `largest` and the magnitudes of x's elements, whichever is larger, as integers.
template <int kRows>
LOWCOMM_INLINE Integers rotateBlock(float* y, const float* x, Integers largest, Blocks blocks, size_t block) {
  const Words turn = splatWord(turnAt(blocks, block));
  for (size_t lane = 0; lane < 16; lane += kLanes) {
    nearStages<kRows>(y, lane, [&](int row) __attribute__((always_inline)) {
      const Floats v = load(x + 16 * row + lane);
      largest = larger(largest, (Integers)((Words)v & kMagnitude));
      return withSigns(v, row, lane, turn);
    });
  }
  farStages<kRows>(y, blocks.units, [&](int row, size_t lane, Floats v) __attribute__((always_inline)) {
    store(y + 16 * row + lane, v);
  });
  return largest;
}

template <int kRows>
bool rotate(float* y, const float* x, size_t count, Blocks blocks) {
  Integers largest{};
  const size_t whole = count / kBlock * kBlock;
  for (size_t at = 0; at < whole; at += kBlock)
    largest = rotateBlock<kRows>(y + at, x + at, largest, blocks, at / kBlock);
  if (whole < count) {
    float padded[kBlock] = {}, rotated[kBlock];
    __builtin_memcpy(padded, x + whole, (count - whole) * sizeof(float));
    largest = rotateBlock<kRows>(rotated, padded, largest, blocks, whole / kBlock);
    __builtin_memcpy(y + whole, rotated, (kRows == 32 ? kBlock : count - whole) * sizeof(float));
  }
  bool taken = true;
  for (int i = 0; i < kLanes; ++i)
    taken &= static_cast<uint32_t>(largest[i]) < kRotatedLimitBits;
  return taken;
}

template <int kRows, bool kAdd>
LOWCOMM_INLINE void unrotateBlock(float* y, const float* x, Blocks blocks, size_t block) {
  const Words turn = splatWord(turnAt(blocks, block));
  float scratch[kBlock];
  for (size_t lane = 0; lane < 16; lane += kLanes) {
    nearStages<kRows>(scratch, lane, [&](int row) __attribute__((always_inline)) { return load(x + 16 * row + lane); });
  }
  farStages<kRows>(scratch, blocks.units, [&](int row, size_t lane, Floats v) __attribute__((always_inline)) {
    float* to = y + 16 * row + lane;
    const Floats value = withSigns(v, row, lane, turn);
    store(to, kAdd ? load(to) + value : value);
  });
}

template <int kRows, bool kAdd>
void unrotate(float* y, const float* x, size_t count, Blocks blocks) {
  const size_t whole = count / kBlock * kBlock;
  for (size_t at = 0; at < whole; at += kBlock)
    unrotateBlock<kRows, kAdd>(y + at, x + at, blocks, at / kBlock);
  if (whole == count) return;
  float padded[kBlock] = {}, values[kBlock];
  __builtin_memcpy(padded, x + whole, (kRows == 32 ? kBlock : count - whole) * sizeof(float));
  unrotateBlock<kRows, false>(values, padded, blocks, whole / kBlock);
  for (size_t i = whole; i < count; ++i)
    y[i] = kAdd ? y[i] + values[i - whole] : values[i - whole];
}

#define LOWCOMM_UNROTATE(rows) {unrotate<rows, false>, unrotate<rows, true>}
#define LOWCOMM_ROTATION_LOOPS                                                                                  \
  {                                                                                                             \
    {rotate<1>, rotate<2>, rotate<4>, rotate<8>, rotate<16>, rotate<32>}, {                                     \
      LOWCOMM_UNROTATE(1), LOWCOMM_UNROTATE(2), LOWCOMM_UNROTATE(4), LOWCOMM_UNROTATE(8), LOWCOMM_UNROTATE(16), \
          LOWCOMM_UNROTATE(32)                                                                                  \
    }                                                                                                           \
  }

}  // namespace
}  // namespace lowcomm

#include "kernels/codebook/codebook_change.inl"

// A form's tables of them.
#define LOWCOMM_CODEBOOK_FORM(form)                            \
  namespace lowcomm::form {                                    \
  constexpr CodebookLoops kCodebooks = LOWCOMM_CODEBOOK_LOOPS; \
  constexpr RotationLoops kRotation = LOWCOMM_ROTATION_LOOPS;  \
  }
