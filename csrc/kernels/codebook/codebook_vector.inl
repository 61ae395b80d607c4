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
// three within 8 neighbouring rows and then two across rows 8 apart, by way of the destination in the first-level
// cache; of fewer rows the first ones of these. The order of the stages, and so the bytes, is the format's.

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

// Returns `largest` and the magnitudes of x's elements, whichever is larger, as integers.
template <int kRows>
LOWCOMM_INLINE Integers rotateBlock(float* y, const float* x, Integers largest, uint32_t turn) {
  const Words turns = splatWord(turn);
  constexpr int kNear = kRows < 8 ? kRows : 8, kFar = kRows / kNear;
  constexpr float kScale = rotationScale(kRows);
  for (int part = 0; part < kRegistersARow; ++part) {
    const size_t lane = static_cast<size_t>(part) * kLanes;
#pragma GCC unroll 4
    for (int first = 0; first < 32; first += kNear) {
      Floats v[kNear];
#pragma GCC unroll 8
      for (int i = 0; i < kNear; ++i) {
        const float* from = x + 16 * (first + i) + lane;
        v[i] = load(from);
        largest = larger(largest, (Integers)((Words)v[i] & kMagnitude));
        v[i] = withSigns(v[i], first + i, lane, turns);
      }
      butterflies(v);
#pragma GCC unroll 8
      for (int i = 0; i < kNear; ++i)
        store(y + 16 * (first + i) + lane, kFar > 1 ? v[i] : v[i] * kScale);
    }
    for (int first = 0; kFar > 1 && first < 32; first += kRows) {
      for (int row = first; row < first + 8; ++row) {
        float* to = y + 16 * row + lane;
        Floats v[kFar];
#pragma GCC unroll 4
        for (int i = 0; i < kFar; ++i)
          v[i] = load(to + 128 * i);
        butterflies(v);
#pragma GCC unroll 4
        for (int i = 0; i < kFar; ++i)
          store(to + 128 * i, v[i] * kScale);
      }
    }
  }
  return largest;
}

template <int kRows>
bool rotate(float* y, const float* x, size_t count, Turns turns) {
  Integers largest{};
  const size_t whole = count / kBlock * kBlock;
  for (size_t at = 0; at < whole; at += kBlock)
    largest = rotateBlock<kRows>(y + at, x + at, largest, turnAt(turns, at / kBlock));
  if (whole < count) {
    float padded[kBlock] = {}, rotated[kBlock];
    __builtin_memcpy(padded, x + whole, (count - whole) * sizeof(float));
    largest = rotateBlock<kRows>(rotated, padded, largest, turnAt(turns, whole / kBlock));
    __builtin_memcpy(y + whole, rotated, (kRows == 32 ? kBlock : count - whole) * sizeof(float));
  }
  bool taken = true;
  for (int i = 0; i < kLanes; ++i)
    taken &= static_cast<uint32_t>(largest[i]) < kRotatedLimitBits;
  return taken;
}

template <int kRows, bool kAdd>
LOWCOMM_INLINE void unrotateBlock(float* y, const float* x, uint32_t turn) {
  constexpr int kNear = kRows < 8 ? kRows : 8, kFar = kRows / kNear;
  const Words turns = splatWord(turn);
  float scratch[kBlock];
  const auto back = [&](Floats v, int row, size_t lane) {
    float* to = y + 16 * row + lane;
    const Floats value = withSigns(v * rotationScale(kRows), row, lane, turns);
    store(to, kAdd ? load(to) + value : value);
  };
  for (int part = 0; part < kRegistersARow; ++part) {
    const size_t lane = static_cast<size_t>(part) * kLanes;
#pragma GCC unroll 4
    for (int first = 0; first < 32; first += kNear) {
      Floats v[kNear];
#pragma GCC unroll 8
      for (int i = 0; i < kNear; ++i)
        v[i] = load(x + 16 * (first + i) + lane);
      butterflies(v);
#pragma GCC unroll 8
      for (int i = 0; i < kNear; ++i) {
        if (kFar > 1) {
          store(scratch + 16 * (first + i) + lane, v[i]);
        } else {
          back(v[i], first + i, lane);
        }
      }
    }
    for (int first = 0; kFar > 1 && first < 32; first += kRows) {
      for (int row = first; row < first + 8; ++row) {
        Floats v[kFar];
#pragma GCC unroll 4
        for (int i = 0; i < kFar; ++i)
          v[i] = load(scratch + 16 * (row + 8 * i) + lane);
        butterflies(v);
#pragma GCC unroll 4
        for (int i = 0; i < kFar; ++i)
          back(v[i], row + 8 * i, lane);
      }
    }
  }
}

template <int kRows, bool kAdd>
void unrotate(float* y, const float* x, size_t count, Turns turns) {
  const size_t whole = count / kBlock * kBlock;
  for (size_t at = 0; at < whole; at += kBlock)
    unrotateBlock<kRows, kAdd>(y + at, x + at, turnAt(turns, at / kBlock));
  if (whole == count) return;
  float padded[kBlock] = {}, values[kBlock];
  __builtin_memcpy(padded, x + whole, (kRows == 32 ? kBlock : count - whole) * sizeof(float));
  unrotateBlock<kRows, false>(values, padded, turnAt(turns, whole / kBlock));
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
