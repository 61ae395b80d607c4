// The registers of AVX-512 as grid_vector.inl and codebook.inl ask for them.
#include <immintrin.h>

namespace lowcomm {
namespace {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));
typedef uint64_t Quads __attribute__((vector_size(kLanes * 4)));

inline __attribute__((always_inline)) Quads multiplyEven(Quads a, Quads b) {
  return (Quads)_mm512_mul_epu32((__m512i)a, (__m512i)b);
}

inline __attribute__((always_inline)) Words evenOdd(Quads even, Quads odd) {
  return (Words)_mm512_mask_mov_epi32((__m512i)even, 0xAAAA, _mm512_slli_epi64((__m512i)odd, 32));
}

inline __attribute__((always_inline)) Words gather(const uint32_t* table, Words index) {
  return (Words)_mm512_i32gather_epi32((__m512i)index, table, 4);
}

template <int kBits>
inline __attribute__((always_inline)) Floats lookUp(const float* table, Words index) {
  if constexpr (kBits <= 4) {
    return (Floats)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
  } else {
    return (Floats)_mm512_i32gather_ps((__m512i)index, table, 4);
  }
}

}  // namespace
}  // namespace lowcomm
