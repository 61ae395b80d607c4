#include "kernels/codebook/codebook.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "base/float_env.h"
#include "kernels/codebook/gauss_levels.h"

namespace lowcomm {
namespace {

uint32_t bitsOfFloat(float x) {
  return std::bit_cast<uint32_t>(x);
}

// Levels are given; the thresholds between them, and what fills the arrays up.
void setThresholds(Codebook& book, int bits) {
  const size_t count = size_t{1} << bits;
  book.bits = bits;
  std::fill(book.level + count, std::end(book.level), book.level[count - 1]);
  std::fill(std::begin(book.threshold), std::end(book.threshold), std::numeric_limits<float>::infinity());
  for (size_t i = 0; i + 1 < count; ++i)
    book.threshold[i] = (book.level[i] + book.level[i + 1]) * 0.5f;
}

void setGaussCells(Codebook& book) {
  constexpr uint32_t kUsed = 512;
  const uint32_t half = 1u << (book.bits - 1);
  const float* threshold = book.threshold + half;  // above 0
  uint32_t below = 0;
  for (uint32_t cell = 0; cell < kUsed; ++cell) {
    // Past the cell's upper end, and past what a tie adds to t's bits (codebook.inl).
    uint32_t own = bitsOfFloat((static_cast<float>(cell) + 0.5f) / 64) + 2;
    const uint32_t code = half + below;
    if (below < half - 1 && bitsOfFloat(threshold[below] + Codebook::kGaussMagic) % kUsed == cell) {
      own = bitsOfFloat(threshold[below]);
      ++below;
    }
    book.cell[cell] = own << 8 | code;
  }
  book.most_a_cell = 1;
  for (int j = 0; j < 8 && book.bits == 4; ++j) {
    const int at = (j + Codebook::kNearestShift) % 8;
    book.nearest[at] = book.nearest[at + 8] = j == 0 ? -1 : threshold[j - 1];
  }
}

// Not inlined: the control register must be set before the first sum (float_env.h).
__attribute__((noinline)) std::array<Codebook, 8> gaussCodebooks() {
  std::array<Codebook, 8> books{};
  for (int bits = 1; bits <= 8; ++bits) {
    Codebook& book = books[bits - 1];
    const size_t half = size_t{1} << (bits - 1);
    for (size_t i = 0; i < half; ++i) {
      book.level[half + i] = kGaussLevels[gaussLevelsAt(bits) + i];
      book.level[half - 1 - i] = -book.level[half + i];
    }
    setThresholds(book, bits);
    setGaussCells(book);
  }
  return books;
}

}  // namespace

void makeLevels(Codebook& book, int bits, const float* levels) {
  const uint32_t thresholds = (1u << bits) - 1;
  std::copy_n(levels, size_t{thresholds} + 1, book.level);
  setThresholds(book, bits);
  book.most_a_cell = 0;
  uint32_t below = 0;
  for (uint32_t cell = 0; cell < Codebook::kCells; ++cell) {
    book.cell[cell] = below;
    int here = 0;
    for (; below < thresholds; ++below, ++here) {
      if (bitsOfFloat(book.threshold[below] + Codebook::kLevelsMagic) % Codebook::kCells != cell) break;
    }
    book.most_a_cell = std::max(book.most_a_cell, here);
  }
}

const Codebook& gaussCodebook(int bits) {
  static const std::array<Codebook, 8> kBooks = [] {
    FloatEnv env;  // whoever asks first: the books are everybody's
    return gaussCodebooks();
  }();
  return kBooks[bits - 1];
}

}  // namespace lowcomm
