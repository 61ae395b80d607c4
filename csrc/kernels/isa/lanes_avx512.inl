// AVX-512 F, BW, DQ and VL: what lanes.inl and the loops on it need of an instruction set.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace lowcomm {
namespace {

#define LOWCOMM_LANES static inline __attribute__((always_inline, unused))

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));
typedef uint64_t Quads __attribute__((vector_size(kLanes * 4)));

// The 64-bit products of the low halves.
LOWCOMM_LANES Quads multiplyEven(Quads a, Quads b) {
  return (Quads)_mm512_mul_epu32((__m512i)a, (__m512i)b);
}

// Low halves of `even` in even lanes, of `odd` in odd ones.
LOWCOMM_LANES Words evenOdd(Quads even, Quads odd) {
  return (Words)_mm512_mask_mov_epi32((__m512i)even, 0xAAAA, _mm512_slli_epi64((__m512i)odd, 32));
}

// kLanes elements of 16 bits, zero-extended.
LOWCOMM_LANES Words loadHalves(const void* p) {
  return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}

// The low 16 bits of values that fit them.
LOWCOMM_LANES void storeHalves(void* p, Words v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v));
}

LOWCOMM_LANES Floats floatsOfHalves(const void* p) {
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
LOWCOMM_LANES void storeAsHalves(void* p, Floats v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}

// A bit a lane: whether it is all ones, not 0.
LOWCOMM_LANES uint32_t maskOf(Words v) {
  return _mm512_movepi32_mask((__m512i)v);
}

// The lanes of `mask`, ascending, to p; past them up to kLanes floats are overwritten. (Compressing into memory by one
// instruction is far slower on some machines.)
LOWCOMM_LANES void storeSelected(void* p, Floats v, uint32_t mask) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), (__m512)v));
}

// table[index], for each lane. By halves: as fast, and emulators know AVX2's gather better (Bochs 2.7 refuses AVX-512's
// where the index is in one of its upper registers).
LOWCOMM_LANES Words gather(const uint32_t* table, Words index) {
  const int* from = reinterpret_cast<const int*>(table);
  const __m256i low = _mm256_i32gather_epi32(from, _mm512_castsi512_si256((__m512i)index), 4);
  const __m256i high = _mm256_i32gather_epi32(from, _mm512_extracti64x4_epi64((__m512i)index, 1), 4);
  return (Words)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// table[index], for each lane, from a table of 2^kBits floats.
template <int kBits>
LOWCOMM_LANES Floats lookUp(const float* table, Words index) {
  if constexpr (kBits <= 4) {
    return (Floats)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
  } else {
    return (Floats)gather(reinterpret_cast<const uint32_t*>(table), index);
  }
}

LOWCOMM_LANES Floats squareRoot(Floats x) {
  return (Floats)_mm512_sqrt_ps((__m512)x);
}

// A table of 16 numbers.
struct SumTable {
  Floats sums;
};

LOWCOMM_LANES SumTable sumTable(const float* sums) {
  return {(Floats)_mm512_load_ps(sums)};
}

LOWCOMM_LANES Floats lookUp(const SumTable& table, Words index) {
  return (Floats)_mm512_permutexvar_ps((__m512i)index, (__m512)table.sums);
}

}  // namespace
}  // namespace lowcomm
