// Statistics and scales of the codecs between a bucket's ends, on grid_vector.inl's vectors; part of it.

namespace lowcomm {
namespace {

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

LOWCOMM_ONCE void makeScales(Scales& scales, size_t buckets, float levels, const GridForm& form) {
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

#include "kernels/isa/philox_vector.inl"

namespace lowcomm {
namespace {

// The random numbers of buckets, kLanes of them from a single call.
struct Dithers {
  uint64_t first = UINT64_MAX;  // a multiple of kLanes, once there are any
  float of[kLanes];
};

LOWCOMM_ONCE void drawDithers(Dithers& dithers, uint64_t first, const PhiloxKey& key) {
  Words draws[4];
  philoxLanes(draws, first, {key.seed, key.stream | kBucketStream, key.step});
  dithers.first = first;
  for (int i = 0; i < kLanes; ++i)
    dithers.of[i] = ditherOf(draws[0][i]);
}

// Each bucket's own random number into scales.magic, and the bases to send; `number` is the first bucket's in the whole
// tensor.
LOWCOMM_INLINE void ditherScales(Scales& scales, float* bases, Dithers& dithers, size_t buckets, uint64_t number,
                                 const PhiloxKey& key) {
  for (size_t i = 0; i < buckets; ++i, ++number) {
    if (number / kLanes * kLanes != dithers.first) drawDithers(dithers, number / kLanes * kLanes, key);
    const float dither = dithers.of[number % kLanes];
    scales.magic[i] = 256.0f + dither;
    bases[i] = shiftedBase(scales.base[i], scales.step[i], dither);
  }
}

}  // namespace
}  // namespace lowcomm
