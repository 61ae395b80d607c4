// Deltas of gauss (CodebookLoops::change), a block at a time, on grid_vector.inl's vectors; part of
// codebook_vector.inl.
//
// What separate loops do in nine passes over a block in the first-level cache takes five: the difference is rotated as
// it is made, its squares are summed as the rotation ends, a row is decoded and begins to be rotated back as its codes
// are packed, and the memory is added as that ends.

namespace lowcomm {
namespace {

// Magnitudes of which no square, and none of the largest one's share, is subnormal: with all of a block's at this or 0,
// and its sum below kMostSquares, sums have the same bits scaled or not.
constexpr float kLeastChange = 0x1p-40f, kMostSquares = 0x1p40f;

// The first stages of a block's rotation, of rows that `row(i, lane)` gives.
template <class Row>
LOWCOMM_INLINE void nearRows(float* scratch, size_t lane, const Row& row) {
#pragma GCC unroll 4
  for (int first = 0; first < 32; first += 8) {
    Floats v[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      v[i] = row(first + i);
    butterflies(v);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      store(scratch + 16 * (first + i) + lane, v[i]);
  }
}

// The last stages: scratch becomes the rotated block. Returns the sum of its squares, in the format's order, or NaN
// where an element is too small for it.
LOWCOMM_INLINE float farRows(float* scratch) {
  Words least = ~Words{};
  float partial[64];
  for (int part = 0; part < kRegistersARow; ++part) {
    const size_t lane = static_cast<size_t>(part) * kLanes;
#pragma GCC unroll 4
    for (int row = 0; row < 4; ++row) {  // rows that add to one partial sum, two kinds of them
      Floats v[2][4];
#pragma GCC unroll 2
      for (int k = 0; k < 2; ++k) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
          v[k][i] = load(scratch + 16 * (row + 4 * k + 8 * i) + lane);
        butterflies(v[k]);
      }
      Floats sum{};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k) {
          const Floats y = v[k][i] * kRotationScale;
          store(scratch + 16 * (row + 4 * k + 8 * i) + lane, y);
          const Words magnitude = ((Words)y & kMagnitude) - 1;  // 0 is above all others
          least = magnitude < least ? magnitude : least;
          sum += y * y;
        }
      }
      store(partial + 16 * row + lane, sum);
    }
  }
  for (int half = 32; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k)
      partial[k] += partial[k + half];
  }
  bool fits = partial[0] < kMostSquares;
  for (int i = 0; i < kLanes; ++i)
    fits &= least[i] >= floatBits(kLeastChange) - 1;
  return fits ? partial[0] : __builtin_nanf("");
}

// What the codes of a bucket decode to: each level's value where one register or two hold them, else by their level.
template <int kBits>
struct Values {
  alignas(64) float value[16];
  const Codebook* book;
  Floats step, gain;

  __attribute__((always_inline)) Values(const GridForm& form, float scale)
      : book(form.book), step(splat(scale * form.unit)), gain(splat(form.gain)) {
    for (int i = 0; i < 16; i += kLanes)
      store(value + i, load(book->level + i) * step * gain);
  }
  __attribute__((always_inline)) Floats of(Words code) const {
    if constexpr (kBits <= 4) {
      return lookUp<kBits>(value, code);
    } else {
      return lookUp<kBits>(book->level, code) * step * gain;
    }
  }
};

// Rotates back what nearRows has begun, and adds it to the memory.
LOWCOMM_INLINE void addFarRows(float* y, float* after, const float* before, const float* scratch, size_t lane,
                               Words turn) {
  for (int row = 0; row < 8; ++row) {
    Floats v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      v[i] = load(scratch + 16 * (row + 8 * i) + lane);
    butterflies(v);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const size_t at = 16 * (row + 8 * i) + lane;
      const Floats sum = load(before + at) + withSigns(v[i] * kRotationScale, row + 8 * i, lane, turn);
      store(after + at, sum);
      if (y) store(y + at, sum);
    }
  }
}

template <int kBits>
size_t changeGauss(std::byte* meta, std::byte* words, float* after, const float* x, const float* before, size_t count,
                   const GridForm& form, Turns turns) {
  constexpr uint32_t kCode = (1u << kBits) - 1;
  const Search<kBits, GridRule::gauss> search(form.book);
  alignas(64) float scratch[kBlock];
  for (size_t at = 0; at < count; at += kBlock, words += 64 * kBits) {
    const Words turn = splatWord(turnAt(turns, at / kBlock));
    for (int part = 0; part < kRegistersARow; ++part) {
      const size_t lane = static_cast<size_t>(part) * kLanes;
      nearRows(scratch, lane, [&](int row) __attribute__((always_inline)) {
        const size_t e = at + 16 * static_cast<size_t>(row) + lane;
        return withSigns(load(x + e) - load(before + e), row, lane, turn);
      });
    }
    const float squares = farRows(scratch);
    if (!(squares < kMostSquares)) return at;
    const CentredScale scale = centredScale(2 * rmsOf(squares, kBlock, floatBits(1.0f)), form);
    meta = putScale(meta, scale.step, form.bf16);
    const Values<kBits> values(form, scale.step);
    const Floats inverse = splat(scale.inverse);
    const auto *soon_x = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(x + at) + 4 * kPrefetch),
               *soon_m = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(before + at) + 4 * kPrefetch);
    for (int part = 0; part < kRegistersARow; ++part) {
      const size_t lane = static_cast<size_t>(part) * kLanes;
      Words packed{};
      nearRows(scratch, lane, [&](int row) __attribute__((always_inline)) {
        if (part == 0) {
          __builtin_prefetch(soon_x + 64 * row);
          __builtin_prefetch(soon_m + 64 * row);
        }
        const Words code = search.code(load(scratch + 16 * row + lane) * inverse) & kCode;
        const int bit = row * kBits % 32, word = row * kBits / 32;
        packed = bit == 0 ? code : packed | code << bit;
        keepOrder(packed);
        if (bit + kBits >= 32) storeWords(words + (16 * word + lane) * 4, packed);
        if (bit + kBits > 32) packed = code >> (32 - bit);
        return values.of(code);
      });
      addFarRows(nullptr, after + at, before + at, scratch, lane, turn);
    }
  }
  return count;
}

template <int kBits>
void advanceGauss(float* y, float* after, const float* before, const std::byte* meta, const std::byte* words,
                  size_t count, const GridForm& form, Turns turns) {
  constexpr uint32_t kCode = (1u << kBits) - 1;
  alignas(64) float apart[kBlock];
  for (size_t at = 0, bucket = 0; at < count; at += kBlock, ++bucket, words += 64 * kBits) {
    const Values<kBits> values(form, scaleAt(meta, bucket, form.bf16));
    const Words turn = splatWord(turnAt(turns, bucket));
    const auto* soon = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(before + at) + 4 * kPrefetch);
    float* const scratch = y == before ? apart : y + at;  // y itself, which has been asked for
    const auto* written = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(y + at) + 4 * kPrefetchWritten);
    for (int part = 0; part < kRegistersARow; ++part) {
      const size_t lane = static_cast<size_t>(part) * kLanes;
      Words packed[kBits];
      for (int i = 0; i < kBits; ++i)
        packed[i] = loadWords(words + (16 * i + lane) * 4);
      nearRows(scratch, lane, [&](int row) __attribute__((always_inline)) {
        if (part == 0) {
          __builtin_prefetch(soon + 64 * row);
          __builtin_prefetch(written + 64 * row, 1);
        }
        const int bit = row * kBits % 32, word = row * kBits / 32;
        Words code = packed[word] >> bit;
        if (bit + kBits > 32) code |= packed[word + 1] << (32 - bit);
        return values.of(code & kCode);
      });
      addFarRows(y + at, after + at, before + at, scratch, lane, turn);
    }
  }
}

}  // namespace
}  // namespace lowcomm
