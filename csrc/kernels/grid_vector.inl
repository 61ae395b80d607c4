// The loops of grid_scalar.cpp on the vectors of lanes.inl, compiled once an instruction set.
//
// Shape of the encode: groups of 1024 elements (4 KiB; a bucket where that is larger) are read once for their
// statistics, while what lies 8 KiB ahead is prefetched, and quantized from the first-level cache. Codes never leave
// the vector lanes: the planar packing puts element e's code in lane e mod 16.

#include "kernels/lanes.inl"

namespace lowcomm {
namespace {

constexpr size_t kGroup = 1024;
constexpr size_t kBlock = 512;
constexpr int kMaxBuckets = 16;  // of 64 elements in a group
constexpr size_t kPrefetch = 2048;

// What runs once a group is not worth a copy in each of a hundred loops.
#define LOWCOMM_ONCE static __attribute__((noinline))

// -x in every lane. x - base and x + (-base) are the same number, but only the addition can take x from memory; the
// empty statement keeps the compiler from making it a subtraction again.
template <class V = Floats>
LOWCOMM_INLINE V negated(float x) {
  V v = splat(-x);
#if defined(__x86_64__)
  if constexpr (sizeof(V) <= __BIGGEST_ALIGNMENT__) asm("" : "+x"(v));  // a vector of one register
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
  float magic[kMaxBuckets] = {};  // what turns a quotient into fixed point, where every bucket has its own
};

// Returns whether every bucket's range is within what form.delta spans.
LOWCOMM_ONCE bool makeScales(Scales& scales, size_t buckets, float levels, const GridForm& form) {
  bool fit = true;
  if (form.delta != 0) {
    for (size_t i = 0; i < buckets; ++i) {
      const AffineScale scale = affineScale(scales.low[i], scales.high[i], levels, form);
      scales.base[i] = scale.base;
      scales.step[i] = scale.step;
      scales.inverse[i] = scale.inverse;
      fit &= scale.fits;
    }
    return fit;
  }
  for (size_t i = 0; i < buckets; i += kLanes) {
    const Floats low = load(scales.low + i) + 0.0f;
    const Floats high = load(scales.high + i) + 0.0f;
    Floats base = low, step, inverse;
    if (form.bf16) {  // bf16Below, bf16Above
      base = (Floats)(((Words)low + ((Words)((Integers)low < 0) & 0xffffu)) & kBf16Mask);
      step = (Floats)(((Words)((high - base) / levels) + 0xffffu) & kBf16Mask);
      inverse = 1.0f / step;
    } else {
      const Floats width = high - low;
      step = width / levels;
      inverse = levels / width;
    }
    store(scales.base + i, base);
    store(scales.step + i, step);
    store(scales.inverse + i, inverse <= 0x1.fffffep127f ? inverse : Floats{});
  }
  return fit;
}

// Base (`bases`: as sent) and step of each bucket.
LOWCOMM_INLINE std::byte* writeMeta(std::byte* meta, const Scales& scales, const float* bases, size_t buckets,
                                    bool bf16) {
  for (size_t i = 0; i < buckets; ++i)
    meta = putScale(putScale(meta, bases[i], bf16), scales.step[i], bf16);
  return meta;
}

// From one scale a bucket to one every 64 elements of the group, zeros past the last bucket. In place, from the back.
LOWCOMM_INLINE void repeatScales(Scales& scales, size_t buckets, uint32_t bucket, bool magics) {
  const int shift = __builtin_ctz(bucket / 64);
  if (shift == 0 && buckets == kMaxBuckets) return;
  for (size_t i = kMaxBuckets; i-- > 0;) {
    const size_t from = i >> shift;
    scales.base[i] = from < buckets ? scales.base[from] : 0;
    scales.inverse[i] = from < buckets ? scales.inverse[from] : 0;
    if (magics) scales.magic[i] = from < buckets ? scales.magic[from] : 256.0f;
  }
}

}  // namespace
}  // namespace lowcomm

#include "kernels/philox_vector.inl"

namespace lowcomm {
namespace {

// Each bucket's own random number into scales.magic, and the bases to send; `number` is the first bucket's in the whole
// tensor.
LOWCOMM_ONCE void ditherScales(Scales& scales, float* bases, size_t buckets, uint64_t number, const GridForm& form,
                               const PhiloxKey& key) {
  const PhiloxKey of_buckets{key.seed, key.stream | kBucketStream, key.step};
  for (size_t i = 0; i < buckets;) {
    const uint64_t aligned = (number + i) / kLanes * kLanes;
    Words draws[4];
    philoxLanes(draws, aligned, of_buckets);
    for (; i < buckets && number + i < aligned + kLanes; ++i) {
      const float dither = ditherOf(draws[0][number + i - aligned]);
      scales.magic[i] = 256.0f + dither;
      bases[i] = form.shifted ? shiftedBase(scales.base[i], scales.step[i], dither) : scales.base[i];
    }
  }
}

}  // namespace
}  // namespace lowcomm

#include "kernels/grid_centred.inl"

#include "kernels/codebook.inl"

namespace lowcomm {
namespace {

constexpr bool aroundZero(GridRule rule) {
  return rule == GridRule::centred || rule == GridRule::sign || rule == GridRule::gauss;
}

// One whole block of 512 elements, with a scale for every kRows rows of it: 32 where a bucket is a block or more, else
// 4, the smallest bucket's. (Larger ones repeat theirs: a form for each size would double this file's code for
// nothing.) Returns `seen` OR all fixed-point values, whose upper 9 bits differ from those of 256...512 only for NaN
// and infinity.
template <int kBits, GridRule kRule, int kRows>
LOWCOMM_INLINE Words encodeBlock(std::byte* words, const float* x, const Scales& scales, size_t first,
                                 const GridForm& form, const Search<kBits, kRule>& search, uint64_t block,
                                 const PhiloxKey& key, Words seen) {
  constexpr bool kStochastic = kRule == GridRule::stochastic, kDithered = kRule == GridRule::dithered;
  const float *base = scales.base + first, *inverse = scales.inverse + first, *magic = scales.magic + first;
  constexpr int kAt = inCodebook(kRule) ? 0 : 15;  // where the code stands in a fixed-point value
  constexpr uint32_t kCode = ((1u << kBits) - 1) << kAt;
  // Half a random unit (64) rides on the constant: one addition saved, the same sum (both are multiples of 2^-15).
  const Floats same_magic = splat(kStochastic ? 256.001953125f : kRule == GridRule::centred ? form.magic : 256.5f);
  const Floats lowest_t = splat(form.low), highest_t = splat(form.high);
  const PhiloxConstants constants = philoxConstants(block * 32, key);
  for (int part = 0; part < kRegistersARow; ++part) {
    const size_t lane = static_cast<size_t>(part) * kLanes;
    Words draws[4];
    Words packed{};
    Floats minus_base = negated(base[0]), inverse_now = splat(inverse[0]);
    Floats magic_now = kDithered ? splat(magic[0]) : same_magic;
#pragma GCC unroll 32
    for (int row = 0; row < 32; ++row) {
      if (row > 0 && row % kRows == 0) {
        minus_base = negated(base[row / kRows]);
        inverse_now = splat(inverse[row / kRows]);
        if (kDithered) magic_now = splat(magic[row / kRows]);
      }
      if (kStochastic && row % 16 == 0) philoxOfBlock(draws, constants, (block * 2 + row / 16) * 16 + lane);
      const Floats element = load(x + 16 * row + lane);
      Words fixed;
      if constexpr (kRule == GridRule::sign) {
        fixed = (Words)(element >= Floats{}) & (1u << 15);
      } else if constexpr (kRule == GridRule::centred) {
        fixed = (Words)(lesser(highest_t, greater(lowest_t, element * inverse_now)) + magic_now);
      } else if constexpr (kRule == GridRule::gauss) {
        fixed = search.code(element * inverse_now);
      } else if constexpr (kRule == GridRule::levels) {
        const Floats t = (element + minus_base) * inverse_now;
        seen |= (Words)(t + 256.0f);
        fixed = search.code(t);
      } else {
        fixed = (Words)((element + minus_base) * inverse_now + magic_now);
        seen |= fixed;
      }
      if (kStochastic) {
        constexpr uint32_t kDraw = 255u << 7;
        const Words draw = draws[row % 16 / 4];
        const int byte = row % 4;
        fixed += (byte == 0 ? draw << 7 : draw >> (8 * byte - 7)) & kDraw;
      }
      // The code goes to bits [at, at + kBits) of the lane's string; a shift to the left drops what the next word gets.
      const int at = row * kBits % 32, word = row * kBits / 32;
      const Words code = fixed & kCode;
      const Words placed = at <= kAt ? code >> (kAt - at) : code << (at - kAt);
      packed = at == 0 ? placed : packed | placed;
      if constexpr (inCodebook(kRule)) keepOrder(packed);
      if (at + kBits >= 32) storeWords(words + (16 * word + lane) * 4, packed);
      if (at + kBits > 32) packed = code >> (kAt + 32 - at);
    }
  }
  return seen;
}

template <int kBits, GridRule kRule, int kRows>
bool encodeRun(std::byte* meta, std::byte* words, const float* x, size_t count, const GridForm& form, uint64_t block,
               const PhiloxKey& key) {
  constexpr float kLevels = kRule == GridRule::levels ? 1 : (1u << kBits) - 1;  // steps in a bucket's range
  constexpr size_t kBlockBytes = 64 * kBits;
  constexpr bool kDithered = kRule == GridRule::dithered, kCentred = aroundZero(kRule);
  const uint32_t bucket = form.bucket;
  const size_t group = bucket > kGroup ? bucket : kGroup;
  uint64_t number = block * kBlock / bucket;
  Scales scales;
  Words seen{};
  bool within = true;
  const auto search = searchOf<kBits, kRule>(form);
  for (size_t start = 0; start < count; start += group) {
    const size_t n = count - start < group ? count - start : group;
    const float* source = x + start;
    const size_t buckets = (n + bucket - 1) / bucket;
    if constexpr (kCentred) {
      if (!measureCentred<kRule>(meta, scales, source, n, start + n == count ? form.absent : 0, form)) return false;
    } else {
      for (size_t i = 0; i < buckets; ++i) {
        const size_t from = i * bucket;
        range(source + from, n - from < bucket ? n - from : bucket, &scales.low[i], &scales.high[i]);
        within &= scales.low[i] > -kFiniteLimit && scales.high[i] < kFiniteLimit;
      }
      within &= makeScales(scales, buckets, kLevels, form);
      if (kDithered) {
        float bases[kMaxBuckets];
        ditherScales(scales, bases, buckets, number, form, key);
        meta = writeMeta(meta, scales, bases, buckets, form.bf16);
        number += buckets;
      } else {
        meta = writeMeta(meta, scales, scales.base, buckets, form.bf16);
      }
    }
    if (kRows < 32) repeatScales(scales, buckets, bucket, kDithered);
    const size_t span = kRows < 32 ? kRows * 16 : bucket;  // elements a scale stands for
    size_t at = 0;
    for (; at + kBlock <= n; at += kBlock, words += kBlockBytes, ++block) {
      seen = encodeBlock<kBits, kRule, kRows>(words, source + at, scales, at / span, form, search, block, key, seen);
    }
    if (at < n) {
      // A short block is filled up with its buckets' bases, whose code is 0 for every draw, as unused bits must be.
      const size_t rest = n - at, first = at / span;
      float padded[kBlock];
      std::byte whole[kBlockBytes];
      __builtin_memcpy(padded, source + at, rest * sizeof(float));
      for (size_t i = rest; i < kBlock; ++i)
        padded[i] = scales.base[first + i / (kRows * 16)];
      seen = encodeBlock<kBits, kRule, kRows>(whole, padded, scales, first, form, search, block, key, seen);
      if (kCentred) clearUnused<kBits>(whole, rest);  // whose code for a base, 0, is none
      __builtin_memcpy(words, whole, ((rest + 15) / 16 * kBits + 31) / 32 * 64);
    }
  }
  for (int i = 0; i < kLanes && !kCentred; ++i)
    within &= (seen[i] >> 23) == 0x87;
  return within;
}

template <int kBits, GridRule kRule>
bool encodeGrid(std::byte* meta, std::byte* words, const float* x, size_t count, const GridForm& form, uint64_t block,
                const PhiloxKey& key) {
  return form.bucket < kBlock ? encodeRun<kBits, kRule, 4>(meta, words, x, count, form, block, key)
                              : encodeRun<kBits, kRule, 32>(meta, words, x, count, form, block, key);
}

// Base and step of a bucket; its code's centre, or gain, and step.
template <GridValue kValue>
LOWCOMM_INLINE void loadScale(float* scale, const std::byte* meta, size_t bucket, const GridForm& form) {
  if constexpr (kValue == GridValue::affine || kValue == GridValue::levels) {
    scale[0] = scaleAt(meta, 2 * bucket, form.bf16);
    scale[1] = scaleAt(meta, 2 * bucket + 1, form.bf16);
  } else {
    scale[0] = kValue == GridValue::gauss ? form.gain : form.centre;
    scale[1] = scaleAt(meta, bucket, form.bf16) * form.unit;
  }
}

template <int kBits, bool kAdd, GridValue kValue, int kRows>
LOWCOMM_INLINE void decodeBlock(float* y, const std::byte* words, const float* scales, const GridForm& form) {
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
      const Floats number = numberOf<kBits, kValue>(code, form);
      const Floats value = kValue == GridValue::centred ? (number - base) * step
                           : kValue == GridValue::gauss ? number * step * base
                                                        : base + step * number;
      float* to = y + 16 * row + lane;
      store(to, kAdd ? load(to) + value : value);
    }
  }
}

template <int kBits, bool kAdd, GridValue kValue, int kRows>
void decodeRun(float* y, const std::byte* meta, const std::byte* words, size_t count, const GridForm& form) {
  constexpr size_t kBlockBytes = 64 * kBits;
  const uint32_t bucket = form.bucket;
  float scales[2 * 32 / kRows];
  for (size_t at = 0; at < count; at += kBlock, words += kBlockBytes) {
    const size_t n = count - at < kBlock ? count - at : kBlock;
    if (kRows == 32) {
      loadScale<kValue>(scales, meta, at / bucket, form);
    } else {
      for (size_t i = 0; i < 8; ++i) {
        // Past the end the last bucket's again: what it makes is thrown away, but its metadata is there to read.
        const size_t of = at + 64 * i < count ? at + 64 * i : count - 1;
        loadScale<kValue>(scales + 2 * i, meta, of / bucket, form);
      }
    }
    if (n == kBlock) {
      __builtin_prefetch(words + 4 * kBlockBytes);
      decodeBlock<kBits, kAdd, kValue, kRows>(y + at, words, scales, form);
      continue;
    }
    std::byte whole[kBlockBytes] = {};
    float values[kBlock];
    __builtin_memcpy(whole, words, ((n + 15) / 16 * kBits + 31) / 32 * 64);
    decodeBlock<kBits, false, kValue, kRows>(values, whole, scales, form);
    for (size_t i = 0; i < n; ++i)
      y[at + i] = kAdd ? y[at + i] + values[i] : values[i];
  }
}

template <int kBits, bool kAdd, GridValue kValue>
void decodeGrid(float* y, const std::byte* meta, const std::byte* words, size_t count, const GridForm& form) {
  return form.bucket < kBlock ? decodeRun<kBits, kAdd, kValue, 4>(y, meta, words, count, form)
                              : decodeRun<kBits, kAdd, kValue, 32>(y, meta, words, count, form);
}

// A KernelTable's grid loops, in its order.
#define LOWCOMM_ENCODE(b)                                                                                    \
  {encodeGrid<b, GridRule::nearest>, encodeGrid<b, GridRule::stochastic>, encodeGrid<b, GridRule::dithered>, \
   encodeGrid<b, GridRule::centred>, b == 1 ? encodeGrid<1, GridRule::sign> : nullptr}
#define LOWCOMM_DECODE_AS(b, value) {decodeGrid<b, false, GridValue::value>, decodeGrid<b, true, GridValue::value>}
#define LOWCOMM_DECODE(b) LOWCOMM_DECODE_AS(b, affine)
#define LOWCOMM_DECODE_CENTRED(b) LOWCOMM_DECODE_AS(b, centred)
#define LOWCOMM_EACH_WIDTH(loops) {loops(1), loops(2), loops(3), loops(4), loops(5), loops(6), loops(7), loops(8)}
#define LOWCOMM_GRID_LOOPS \
  LOWCOMM_EACH_WIDTH(LOWCOMM_ENCODE), LOWCOMM_EACH_WIDTH(LOWCOMM_DECODE), LOWCOMM_EACH_WIDTH(LOWCOMM_DECODE_CENTRED)

// A CodebookLoops'. Rotated buckets are of whole blocks.
#define LOWCOMM_ENCODE_BY_BOOK(b) {encodeGrid<b, GridRule::levels>, encodeRun<b, GridRule::gauss, 32>}
#define LOWCOMM_DECODE_BY_BOOK(b)                                                         \
  {                                                                                       \
    LOWCOMM_DECODE_AS(b, levels), {                                                       \
      decodeRun<b, false, GridValue::gauss, 32>, decodeRun<b, true, GridValue::gauss, 32> \
    }                                                                                     \
  }
#define LOWCOMM_CODEBOOK_LOOPS {LOWCOMM_EACH_WIDTH(LOWCOMM_ENCODE_BY_BOOK), LOWCOMM_EACH_WIDTH(LOWCOMM_DECODE_BY_BOOK)}

}  // namespace
}  // namespace lowcomm
