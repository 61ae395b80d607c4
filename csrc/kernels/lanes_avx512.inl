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

}  // namespace
}  // namespace lowcomm
