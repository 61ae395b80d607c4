#pragma once

#include <cstdint>

// Before an inline function that CUDA kernels share with the loops of the CPU. Elsewhere than in a .cu it says nothing.
#ifdef __CUDACC__
#define LOWCOMM_HOST_DEVICE __host__ __device__
#else
#define LOWCOMM_HOST_DEVICE
#endif

// LOWCOMM_HOST_DEVICE for functions that loops of several instruction sets include: always inlined and of internal
// linkage, because the linker must not keep one instruction set's copy for the whole program.
#define LOWCOMM_RULE LOWCOMM_HOST_DEVICE static inline __attribute__((always_inline))

namespace lowcomm {

LOWCOMM_RULE uint32_t floatBits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}
LOWCOMM_RULE float floatOf(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

// Operations that are rounded by themselves in device code too, whatever its compiler is told: never half of a fused
// multiply-add.
LOWCOMM_RULE float roundedProduct(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
LOWCOMM_RULE float squareRoot(float x) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

}  // namespace lowcomm
