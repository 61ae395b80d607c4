// Deltas of gauss (CodebookLoops::change), a block at a time, on grid_vector.inl's vectors; part of
// codebook_vector.inl.
//
// What separate loops do in nine passes over a block in the first-level cache takes five: the difference is rotated as
// it is made, a row is decoded and begins to be rotated back as its codes are packed, and the memory is added as that
// ends.

namespace lowcomm {
namespace {

// Magnitudes of which no square, and none of the largest one's share, is subnormal: with all of a block's at this or 0,
// and its sum below kMostSquares, sums have the same bits scaled or not.
constexpr float kLeastChange = 0x1p-40f, kMostSquares = 0x1p40f;

// The sum of a block's squares, in the format's order, or NaN where an element is too small for it.
LOWCOMM_INLINE float squaresOf(const float* block) {
  Words least = ~Words{};
  float partial[64];
  for (size_t place = 0; place < 64; place += kLanes) {
    Floats sum{};
#pragma GCC unroll 8
    for (size_t at = place; at < kBlock; at += 64) {
      const Floats y = load(block + at);
      const Words magnitude = ((Words)y & kMagnitude) - 1;  // 0 is above all others
      least = magnitude < least ? magnitude : least;
      sum += y * y;
    }
    store(partial + place, sum);
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

// Decodes the codes of a bucket: by each level's value if one or two registers hold them, otherwise by their level.
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

template <int kBits>
size_t changeGauss(std::byte* meta, std::byte* words, float* after, const float* x, const float* before, size_t count,
                   const GridForm& form, Blocks blocks) {
  constexpr uint32_t kCode = (1u << kBits) - 1;
  const Search<kBits, GridRule::gauss> search(form.book);
  alignas(64) float scratch[kBlock];
  for (size_t at = 0; at < count; at += kBlock, words += 64 * kBits) {
    const Words turn = splatWord(turnAt(blocks, at / kBlock));
    for (size_t lane = 0; lane < 16; lane += kLanes) {
      nearStages<32>(scratch, lane, [&](int row) __attribute__((always_inline)) {
        const size_t e = at + 16 * static_cast<size_t>(row) + lane;
        return withSigns(load(x + e) - load(before + e), row, lane, turn);
      });
    }
    farStages<32>(scratch, blocks.units, [&](int row, size_t lane, Floats v) __attribute__((always_inline)) {
      store(scratch + 16 * row + lane, v);
    });
    const float squares = squaresOf(scratch);
    if (!(squares < kMostSquares)) return at;
    const CentredScale scale = centredScale(2 * rmsOf(squares, kBlock, floatBits(1.0f)), form);
    meta = putScale(meta, scale.step, form.bf16);
    const Values<kBits> values(form, scale.step);
    const Floats inverse = splat(scale.inverse);
    const auto *soon_x = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(x + at) + 4 * kPrefetch),
               *soon_m = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(before + at) + 4 * kPrefetch);
    for (size_t lane = 0; lane < 16; lane += kLanes) {
      Words packed{};
      nearStages<32>(scratch, lane, [&](int row) __attribute__((always_inline)) {
        if (lane == 0) {
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
    }
    farStages<32>(scratch, blocks.units, [&](int row, size_t lane, Floats v) __attribute__((always_inline)) {
      const size_t e = at + 16 * static_cast<size_t>(row) + lane;
      store(after + e, load(before + e) + withSigns(v, row, lane, turn));
    });
  }
  return count;
}

template <int kBits>
void advanceGauss(float* y, float* after, const float* before, const std::byte* meta, const std::byte* words,
                  size_t count, const GridForm& form, Blocks blocks) {
  constexpr uint32_t kCode = (1u << kBits) - 1;
  alignas(64) float apart[kBlock];
  for (size_t at = 0, bucket = 0; at < count; at += kBlock, ++bucket, words += 64 * kBits) {
    const Values<kBits> values(form, scaleAt(meta, bucket, form.bf16));
    const Words turn = splatWord(turnAt(blocks, bucket));
    const auto* soon = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(before + at) + 4 * kPrefetch);
    float* const scratch = y == before ? apart : y + at;  // y itself, which has been asked for
    const auto* written = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(y + at) + 4 * kPrefetchWritten);
    for (size_t lane = 0; lane < 16; lane += kLanes) {
      Words packed[kBits];
      for (int i = 0; i < kBits; ++i)
        packed[i] = loadWords(words + (16 * i + lane) * 4);
      nearStages<32>(scratch, lane, [&](int row) __attribute__((always_inline)) {
        if (lane == 0) {
          __builtin_prefetch(soon + 64 * row);
          __builtin_prefetch(written + 64 * row, 1);
        }
        const int bit = row * kBits % 32, word = row * kBits / 32;
        Words code = packed[word] >> bit;
        if (bit + kBits > 32) code |= packed[word + 1] << (32 - bit);
        return values.of(code & kCode);
      });
    }
    farStages<32>(scratch, blocks.units, [&](int row, size_t lane, Floats v) __attribute__((always_inline)) {
      const size_t e = at + 16 * static_cast<size_t>(row) + lane;
      const Floats sum = load(before + e) + withSigns(v, row, lane, turn);
      store(after + e, sum);
      store(y + e, sum);
    });
  }
}

}  // namespace
}  // namespace lowcomm
