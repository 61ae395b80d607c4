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

}  // namespace
}  // namespace lowcomm
