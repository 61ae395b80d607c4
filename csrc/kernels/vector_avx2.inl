// The registers of AVX2 as grid_vector.inl and codebook.inl ask for them.
#include <immintrin.h>

namespace lowcomm {
namespace {

constexpr int kLanes = 8;
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));
typedef uint64_t Quads __attribute__((vector_size(kLanes * 4)));

inline __attribute__((always_inline)) Quads multiplyEven(Quads a, Quads b) {
  return (Quads)_mm256_mul_epu32((__m256i)a, (__m256i)b);
}

inline __attribute__((always_inline)) Words evenOdd(Quads even, Quads odd) {
  return (Words)_mm256_blend_epi32((__m256i)even, _mm256_slli_epi64((__m256i)odd, 32), 0xAA);
}

inline __attribute__((always_inline)) Words gather(const uint32_t* table, Words index) {
  return (Words)_mm256_i32gather_epi32((const int*)table, (__m256i)index, 4);
}

template <int kBits>
inline __attribute__((always_inline)) Floats lookUp(const float* table, Words index) {
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

}  // namespace
}  // namespace lowcomm
