// The loops of grid_scalar.cpp on GNU vectors, compiled once an instruction set. The including file, grid_<isa>.cpp,
// has defined kLanes, the width of its registers in floats (never more: GCC splits wider vectors into very slow code),
// and
//   Quads multiplyEven(Quads a, Quads b)   the 64-bit products of the low halves
//   Words evenOdd(Quads even, Quads odd)   low halves of `even` in even lanes, of `odd` in odd ones
// Everything is in an unnamed namespace, and no inline function of another header is called: the linker could otherwise
// keep this instruction set's copy of it for the whole program.
//
// Shape of the encode: groups of 1024 elements (4 KiB; a bucket where that is larger) are read once for their
// statistics, while what lies 8 KiB ahead is prefetched, and quantized from the first-level cache. Codes never leave
// the vector lanes: the planar packing puts element e's code in lane e mod 16.

namespace lowcomm {
namespace {

constexpr int kRegistersARow = 16 / kLanes;
constexpr size_t kGroup = 1024;
constexpr size_t kBlock = 512;
constexpr int kMaxBuckets = 16;  // of 64 elements in a group
constexpr size_t kPrefetch = 2048;

typedef Floats FloatsInMemory __attribute__((aligned(1), may_alias));
typedef Words WordsInMemory __attribute__((aligned(1), may_alias));

#define LOWCOMM_INLINE static inline __attribute__((always_inline))

LOWCOMM_INLINE Floats load(const void* p) {
  return *static_cast<const FloatsInMemory*>(p);
}
LOWCOMM_INLINE Words loadWords(const void* p) {
  return *static_cast<const WordsInMemory*>(p);
}
LOWCOMM_INLINE void store(void* p, Floats v) {
  *static_cast<FloatsInMemory*>(p) = v;
}
LOWCOMM_INLINE void storeWords(void* p, Words v) {
  *static_cast<WordsInMemory*>(p) = v;
}
LOWCOMM_INLINE Floats splat(float x) {
  return Floats{} + x;
}
LOWCOMM_INLINE Words splatWord(uint32_t x) {
  return Words{} + x;
}

// -x in every lane. x - base and x + (-base) are the same number, but only the addition can take x from memory; the
// empty statement keeps the compiler from making it a subtraction again.
LOWCOMM_INLINE Floats negated(float x) {
  Floats v = splat(-x);
#if defined(__x86_64__)
  asm("" : "+x"(v));
#endif
  return v;
}

LOWCOMM_INLINE Floats lesser(Floats a, Floats b) {
  return a < b ? a : b;
}
LOWCOMM_INLINE Floats greater(Floats a, Floats b) {
  return a > b ? a : b;
}

// A loop over 8 lanes compiles to a handful of shuffles, one over 16 does not: those are halved first. NaN needs no
// care, the quantizer sees it.
typedef float EightFloats __attribute__((vector_size(32)));

template <class V>
LOWCOMM_INLINE float lowest(V v) {
  constexpr int kCount = sizeof(V) / sizeof(float);
  if constexpr (kCount == 16) {
    EightFloats half[2];
    __builtin_memcpy(half, &v, sizeof(v));
    return lowest(half[0] < half[1] ? half[0] : half[1]);
  } else {
    for (int half = kCount / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i)
        v[i] = v[i + half] < v[i] ? v[i + half] : v[i];
    }
    return v[0];
  }
}

template <class V>
LOWCOMM_INLINE float highest(V v) {
  constexpr int kCount = sizeof(V) / sizeof(float);
  if constexpr (kCount == 16) {
    EightFloats half[2];
    __builtin_memcpy(half, &v, sizeof(v));
    return highest(half[0] > half[1] ? half[0] : half[1]);
  } else {
    for (int half = kCount / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i)
        v[i] = v[i + half] > v[i] ? v[i + half] : v[i];
    }
    return v[0];
  }
}

// Minimum and maximum of count >= 1 elements.
LOWCOMM_INLINE void range(const float* x, size_t count, float* low, float* high) {
  constexpr size_t kStride = 64;
  const size_t whole = count / kStride * kStride;
  Floats low0 = splat(x[0]), high0 = low0, low1 = low0, high1 = low0;
  for (size_t i = 0; i < whole; i += kStride) {
    for (size_t j = 0; j < kStride; j += 2 * kLanes) {
      if (j % 16 == 0) __builtin_prefetch(x + i + kPrefetch + j);
      if (2 * kLanes > 16) __builtin_prefetch(x + i + kPrefetch + j + 16);
      const Floats a = load(x + i + j), b = load(x + i + j + kLanes);
      low0 = lesser(low0, a);
      high0 = greater(high0, a);
      low1 = lesser(low1, b);
      high1 = greater(high1, b);
    }
  }
  float l = lowest(lesser(low0, low1)), h = highest(greater(high0, high1));
  for (size_t i = whole; i < count; ++i) {
    l = x[i] < l ? x[i] : l;
    h = x[i] > h ? x[i] : h;
  }
  *low = l;
  *high = h;
}

// The scales of up to kMaxBuckets buckets at once: one division a register instead of one a bucket.
struct Scales {
  float low[kMaxBuckets] = {}, high[kMaxBuckets] = {};
  float base[kMaxBuckets] = {}, step[kMaxBuckets] = {}, inverse[kMaxBuckets] = {};
};

LOWCOMM_INLINE void makeScales(Scales& scales, size_t buckets, float levels) {
  for (size_t i = 0; i < buckets; i += kLanes) {
    const Floats low = load(scales.low + i) + 0.0f;
    const Floats high = load(scales.high + i) + 0.0f;
    const Floats width = high - low;
    const Floats inverse = levels / width;
    store(scales.base + i, low);
    store(scales.step + i, width / levels);
    store(scales.inverse + i, inverse <= 0x1.fffffep127f ? inverse : Floats{});
  }
}

// From one scale a bucket to one every 64 elements of the group, zeros past the last bucket. In place, from the back.
LOWCOMM_INLINE void repeatScales(Scales& scales, size_t buckets, uint32_t bucket) {
  const int shift = __builtin_ctz(bucket / 64);
  if (shift == 0 && buckets == kMaxBuckets) return;
  for (size_t i = kMaxBuckets; i-- > 0;) {
    const size_t from = i >> shift;
    scales.base[i] = from < buckets ? scales.base[from] : 0;
    scales.inverse[i] = from < buckets ? scales.inverse[from] : 0;
  }
}

}  // namespace
}  // namespace lowcomm

#include "kernels/philox_vector.inl"

namespace lowcomm {
namespace {

// One whole block of 512 elements, with a scale for every kRows rows of it: 32 where a bucket is a block or more, else
// 4, the smallest bucket's. (Larger ones repeat theirs: a form for each size would double this file's code for
// nothing.) Returns `seen` OR all fixed-point values, whose upper 9 bits differ from those of 256...512 only for NaN
// and infinity.
template <int kBits, bool kStochastic, int kRows>
LOWCOMM_INLINE Words encodeBlock(std::byte* words, const float* x, const float* base, const float* inverse,
                                 uint64_t block, const PhiloxKey& key, Words seen) {
  constexpr uint32_t kCode = ((1u << kBits) - 1) << 15;  // where the code stands in a fixed-point value
  // Half a random unit (64) rides on the constant: one addition saved, the same sum (both are multiples of 2^-15).
  const Floats magic = splat(kStochastic ? 256.001953125f : 256.5f);
  const PhiloxConstants constants = philoxConstants(block * 32, key);
  for (int part = 0; part < kRegistersARow; ++part) {
    const size_t lane = static_cast<size_t>(part) * kLanes;
    Words draws[4];
    Words packed{};
    Floats minus_base = negated(base[0]), inverse_now = splat(inverse[0]);
#pragma GCC unroll 32
    for (int row = 0; row < 32; ++row) {
      if (row > 0 && row % kRows == 0) {
        minus_base = negated(base[row / kRows]);
        inverse_now = splat(inverse[row / kRows]);
      }
      if (kStochastic && row % 16 == 0) philoxOfBlock(draws, constants, (block * 2 + row / 16) * 16 + lane);
      Words fixed = (Words)((load(x + 16 * row + lane) + minus_base) * inverse_now + magic);
      seen |= fixed;
      if (kStochastic) {
        constexpr uint32_t kDraw = 255u << 7;
        const Words draw = draws[row % 16 / 4];
        const int byte = row % 4;
        fixed += (byte == 0 ? draw << 7 : draw >> (8 * byte - 7)) & kDraw;
      }
      // The code goes to bits [at, at + kBits) of the lane's string; a shift to the left drops what the next word gets.
      const int at = row * kBits % 32, word = row * kBits / 32;
      const Words code = fixed & kCode;
      const Words placed = at <= 15 ? code >> (15 - at) : code << (at - 15);
      packed = at == 0 ? placed : packed | placed;
      if (at + kBits >= 32) storeWords(words + (16 * word + lane) * 4, packed);
      if (at + kBits > 32) packed = code >> (15 + 32 - at);
    }
  }
  return seen;
}

template <int kBits, bool kStochastic, int kRows>
bool encodeRun(std::byte* meta, std::byte* words, const float* x, size_t count, uint32_t bucket, uint64_t block,
               const PhiloxKey& key) {
  constexpr float kLevels = (1u << kBits) - 1;
  constexpr size_t kBlockBytes = 64 * kBits;
  const size_t group = bucket > kGroup ? bucket : kGroup;
  Scales scales;
  Words seen{};
  bool within = true;
  for (size_t start = 0; start < count; start += group) {
    const size_t n = count - start < group ? count - start : group;
    const float* source = x + start;
    const size_t buckets = (n + bucket - 1) / bucket;
    for (size_t i = 0; i < buckets; ++i) {
      const size_t from = i * bucket;
      range(source + from, n - from < bucket ? n - from : bucket, &scales.low[i], &scales.high[i]);
      within &= scales.low[i] > -kFiniteLimit && scales.high[i] < kFiniteLimit;
    }
    makeScales(scales, buckets, kLevels);
    for (size_t i = 0; i < buckets; ++i, meta += 8) {
      __builtin_memcpy(meta, &scales.base[i], 4);
      __builtin_memcpy(meta + 4, &scales.step[i], 4);
    }
    if (kRows < 32) repeatScales(scales, buckets, bucket);
    const size_t span = kRows < 32 ? kRows * 16 : bucket;  // elements a scale stands for
    size_t at = 0;
    for (; at + kBlock <= n; at += kBlock, words += kBlockBytes, ++block) {
      const size_t first = at / span;
      seen = encodeBlock<kBits, kStochastic, kRows>(words, source + at, scales.base + first, scales.inverse + first,
                                                    block, key, seen);
    }
    if (at < n) {
      // A short block is filled up with its buckets' bases, whose code is 0 for every draw, as unused bits must be.
      const size_t rest = n - at, first = at / span;
      float padded[kBlock];
      std::byte whole[kBlockBytes];
      __builtin_memcpy(padded, source + at, rest * sizeof(float));
      for (size_t i = rest; i < kBlock; ++i)
        padded[i] = scales.base[first + i / (kRows * 16)];
      seen = encodeBlock<kBits, kStochastic, kRows>(whole, padded, scales.base + first, scales.inverse + first, block,
                                                    key, seen);
      __builtin_memcpy(words, whole, ((rest + 15) / 16 * kBits + 31) / 32 * 64);
    }
  }
  for (int i = 0; i < kLanes; ++i)
    within &= (seen[i] >> 23) == 0x87;
  return within;
}

template <int kBits, bool kStochastic>
bool encodeGrid(std::byte* meta, std::byte* words, const float* x, size_t count, uint32_t bucket, uint64_t block,
                const PhiloxKey& key) {
  return bucket < kBlock ? encodeRun<kBits, kStochastic, 4>(meta, words, x, count, bucket, block, key)
                         : encodeRun<kBits, kStochastic, 32>(meta, words, x, count, bucket, block, key);
}

template <int kBits, bool kAdd, int kRows>
LOWCOMM_INLINE void decodeBlock(float* y, const std::byte* words, const float* scales) {
  constexpr uint32_t kTop = (1u << kBits) - 1;
  for (int part = 0; part < kRegistersARow; ++part) {
    const size_t lane = static_cast<size_t>(part) * kLanes;
    Words packed[kBits];
    for (int i = 0; i < kBits; ++i)
      packed[i] = loadWords(words + (16 * i + lane) * 4);
    Floats base = splat(scales[0]), step = splat(scales[1]);
#pragma GCC unroll 32
    for (int row = 0; row < 32; ++row) {
      if (row > 0 && row % kRows == 0) {
        base = splat(scales[2 * (row / kRows)]);
        step = splat(scales[2 * (row / kRows) + 1]);
      }
      const int at = row * kBits % 32, word = row * kBits / 32;
      Words code = packed[word] >> at;
      if (at + kBits > 32) code |= packed[word + 1] << (32 - at);
      if (at + kBits != 32) code &= kTop;
      const Floats value = base + step * __builtin_convertvector((Integers)code, Floats);
      float* to = y + 16 * row + lane;
      store(to, kAdd ? load(to) + value : value);
    }
  }
}

template <int kBits, bool kAdd, int kRows>
void decodeRun(float* y, const std::byte* meta, const std::byte* words, size_t count, uint32_t bucket) {
  constexpr size_t kBlockBytes = 64 * kBits;
  float scales[2 * 32 / kRows];
  for (size_t at = 0; at < count; at += kBlock, words += kBlockBytes) {
    const size_t n = count - at < kBlock ? count - at : kBlock;
    if (kRows == 32) {
      __builtin_memcpy(scales, meta + at / bucket * 8, 8);
    } else {
      for (size_t i = 0; i < 8; ++i) {
        // Past the end the last bucket's again: what it makes is thrown away, but its metadata is there to read.
        const size_t of = at + 64 * i < count ? at + 64 * i : count - 1;
        __builtin_memcpy(scales + 2 * i, meta + of / bucket * 8, 8);
      }
    }
    if (n == kBlock) {
      __builtin_prefetch(words + 4 * kBlockBytes);
      decodeBlock<kBits, kAdd, kRows>(y + at, words, scales);
      continue;
    }
    std::byte whole[kBlockBytes] = {};
    float values[kBlock];
    __builtin_memcpy(whole, words, ((n + 15) / 16 * kBits + 31) / 32 * 64);
    decodeBlock<kBits, false, kRows>(values, whole, scales);
    for (size_t i = 0; i < n; ++i)
      y[at + i] = kAdd ? y[at + i] + values[i] : values[i];
  }
}

template <int kBits, bool kAdd>
void decodeGrid(float* y, const std::byte* meta, const std::byte* words, size_t count, uint32_t bucket) {
  return bucket < kBlock ? decodeRun<kBits, kAdd, 4>(y, meta, words, count, bucket)
                         : decodeRun<kBits, kAdd, 32>(y, meta, words, count, bucket);
}

// Brace lists of a KernelTable's grid loops.
#define LOWCOMM_FORMS(loop)                                                                                \
  {                                                                                                        \
    {loop<1, false>, loop<1, true>}, {loop<2, false>, loop<2, true>}, {loop<3, false>, loop<3, true>},     \
        {loop<4, false>, loop<4, true>}, {loop<5, false>, loop<5, true>}, {loop<6, false>, loop<6, true>}, \
        {loop<7, false>, loop<7, true>}, {                                                                 \
      loop<8, false>, loop<8, true>                                                                        \
    }                                                                                                      \
  }

}  // namespace
}  // namespace lowcomm
