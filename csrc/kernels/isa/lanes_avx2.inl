// AVX2 and F16C: what lanes.inl and the loops on it need of an instruction set.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace lowcomm {
namespace {

#define LOWCOMM_LANES static inline __attribute__((always_inline, unused))

constexpr int kLanes = 8;
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));
typedef uint64_t Quads __attribute__((vector_size(kLanes * 4)));

// The 64-bit products of the low halves.
LOWCOMM_LANES Quads multiplyEven(Quads a, Quads b) {
  return (Quads)_mm256_mul_epu32((__m256i)a, (__m256i)b);
}

// Low halves of `even` in even lanes, of `odd` in odd ones.
LOWCOMM_LANES Words evenOdd(Quads even, Quads odd) {
  return (Words)_mm256_blend_epi32((__m256i)even, _mm256_slli_epi64((__m256i)odd, 32), 0xAA);
}

// kLanes elements of 16 bits, zero-extended.
LOWCOMM_LANES Words loadHalves(const void* p) {
  return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
}

// The low 16 bits of values that fit them.
LOWCOMM_LANES void storeHalves(void* p, Words v) {
  const __m128i low = _mm256_castsi256_si128((__m256i)v), high = _mm256_extracti128_si256((__m256i)v, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(low, high));
}

LOWCOMM_LANES Floats floatsOfHalves(const void* p) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
LOWCOMM_LANES void storeAsHalves(void* p, Floats v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}

// A bit a lane: whether it is all ones, not 0.
LOWCOMM_LANES uint32_t maskOf(Words v) {
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)v));
}

// For every byte the numbers of its bits that are set, ascending, a byte each.
struct BitsOfBytes {
  uint64_t of[256];
  constexpr BitsOfBytes() : of() {
    for (uint64_t mask = 0; mask < 256; ++mask) {
      int found = 0;
      for (uint64_t bit = 0; bit < 8; ++bit) {
        if (mask >> bit & 1) of[mask] |= bit << 8 * found++;
      }
    }
  }
};
constexpr BitsOfBytes kBitsOfBytes;

// The lanes of `mask`, ascending, to p; past them up to kLanes floats are overwritten.
LOWCOMM_LANES void storeSelected(void* p, Floats v, uint32_t mask) {
  const __m256i from = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(kBitsOfBytes.of[mask])));
  _mm256_storeu_ps(static_cast<float*>(p), _mm256_permutevar8x32_ps((__m256)v, from));
}

// table[index], for each lane.
LOWCOMM_LANES Words gather(const uint32_t* table, Words index) {
  return (Words)_mm256_i32gather_epi32((const int*)table, (__m256i)index, 4);
}

// table[index], for each lane, from a table of 2^kBits floats.
template <int kBits>
LOWCOMM_LANES Floats lookUp(const float* table, Words index) {
  if constexpr (kBits <= 4) {
    const __m256i place = (__m256i)index;  // of which a permutation takes three bits
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), place);
    if constexpr (kBits <= 3) return (Floats)low;
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), place);
    return (Floats)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(place, 28)));
  } else {
    return (Floats)_mm256_i32gather_ps(table, (__m256i)index, 4);
  }
}

LOWCOMM_LANES Floats squareRoot(Floats x) {
  return (Floats)_mm256_sqrt_ps((__m256)x);
}

// A table of 16 numbers, of which the second eight are the first with their signs changed. The first eight are here;
// the others have their sign from the index.
struct SumTable {
  Floats sums;
};

LOWCOMM_LANES SumTable sumTable(const float* sums) {
  return {(Floats)_mm256_load_ps(sums)};
}

LOWCOMM_LANES Floats lookUp(const SumTable& table, Words index) {
  const Words sum = (Words)_mm256_permutevar8x32_ps((__m256)table.sums, (__m256i)index);
  return (Floats)(sum ^ (index << 28 & 0x80000000u));
}

}  // namespace
}  // namespace lowcomm
