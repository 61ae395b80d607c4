// Statistics and scales of the codecs around 0, on grid_vector.inl's vectors; part of it.

namespace lowcomm {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffffu;

LOWCOMM_INLINE Integers larger(Integers a, Integers b) {
  return a > b ? a : b;
}

// Bits of the largest of count >= 1 magnitudes. As integers, so that NaN is the largest of all.
LOWCOMM_INLINE uint32_t largestOf(const float* x, size_t count) {
  constexpr size_t kStride = 32;
  const size_t whole = count / kStride * kStride;
  Integers largest0{}, largest1{};
  for (size_t i = 0; i < whole; i += kStride) {
    for (size_t j = 0; j < kStride; j += 2 * kLanes) {
      largest0 = larger(largest0, (Integers)(loadWords(x + i + j) & kMagnitude));
      largest1 = larger(largest1, (Integers)(loadWords(x + i + j + kLanes) & kMagnitude));
    }
  }
  largest0 = larger(largest0, largest1);
  uint32_t largest = 0;
  for (int i = 0; i < kLanes; ++i)
    largest = static_cast<uint32_t>(largest0[i]) > largest ? static_cast<uint32_t>(largest0[i]) : largest;
  for (size_t i = whole; i < count; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, x + i, 4);
    largest = (bits & kMagnitude) > largest ? bits & kMagnitude : largest;
  }
  return largest;
}

template <bool kSquares>
LOWCOMM_INLINE void addTerms(Floats (&partial)[64 / kLanes], const float* x, Floats down) {
  for (int j = 0; j < 64 / kLanes; ++j) {
    const Floats y = load(x + j * kLanes) * down;
    partial[j] += kSquares ? y * y : (Floats)((Words)y & kMagnitude);
  }
}

// Sum of |y| or of y·y over y = x·2^-E. The order is the format's: 64 partial sums, then halves added.
template <bool kSquares>
LOWCOMM_INLINE float sumOf(const float* x, size_t count, uint32_t largest) {
  const Floats down = splat(scaleDown(largest));
  const size_t whole = count / 64 * 64;
  Floats partial[64 / kLanes] = {};
  for (size_t i = 0; i < whole; i += 64)
    addTerms<kSquares>(partial, x + i, down);
  if (whole < count) {
    float rest[64] = {};  // zeros add nothing
    __builtin_memcpy(rest, x + whole, (count - whole) * sizeof(float));
    addTerms<kSquares>(partial, rest, down);
  }
  for (int half = 32 / kLanes; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j)
      partial[j] += partial[j + half];
  }
  float sums[kLanes];
  store(sums, partial[0]);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k)
      sums[k] += sums[k + half];
  }
  return sums[0];
}

// `counted` of the elements enter a mean.
template <GridRule kRule>
LOWCOMM_INLINE float centredRange(const float* x, size_t count, size_t counted, uint32_t largest,
                                  const GridForm& form) {
  if (kRule == GridRule::sign) return meanOf(sumOf<false>(x, count, largest), counted, largest);
  return form.rms ? 2 * rmsOf(sumOf<true>(x, count, largest), counted, largest) : floatOf(largest);
}

// Steps of a group's buckets to meta, which moves past them, their inverses to scales. False when an element is
// refused. `absent` is form.absent where the last bucket is among them, else 0.
template <GridRule kRule>
LOWCOMM_ONCE bool measureCentred(std::byte*& meta, Scales& scales, const float* x, size_t count, size_t absent,
                                 const GridForm& form) {
  const uint32_t bucket = form.bucket;
  for (size_t from = 0, i = 0; from < count; from += bucket, ++i) {
    const size_t n = count - from < bucket ? count - from : bucket;
    const uint32_t largest = largestOf(x + from, n);
    if (largest >= kFiniteLimitBits) return false;
    const size_t counted = from + n == count ? n - absent : n;
    const CentredScale scale = centredScale(centredRange<kRule>(x + from, n, counted, largest, form), form);
    scales.inverse[i] = scale.inverse;
    meta = putScale(meta, scale.step, form.bf16);
  }
  return true;
}

// Zeros the bits of a short block of `count` elements that belong to none of them.
template <int kBits>
LOWCOMM_INLINE void clearUnused(std::byte* words, size_t count) {
  for (size_t lane = 0; lane < 16; ++lane) {
    const size_t used = (count + 15 - lane) / 16 * kBits;
    for (size_t word = used / 32; word < kBits; ++word) {
      uint32_t bits;
      std::byte* at = words + (word * 16 + lane) * 4;
      __builtin_memcpy(&bits, at, 4);
      bits = word == used / 32 ? bits & ((1u << used % 32) - 1) : 0;
      __builtin_memcpy(at, &bits, 4);
    }
  }
}

}  // namespace
}  // namespace lowcomm
