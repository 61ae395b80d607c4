#pragma once

#include "base/host_device.h"

namespace lowcomm {

// Operations that are rounded by themselves in device code too, whatever its compiler is told.
//
// Always inlined and of internal linkage, as files for different instruction sets include this.
#define LOWCOMM_ROUNDED LOWCOMM_HOST_DEVICE static inline __attribute__((always_inline))

// Never half of a fused multiply-add.
LOWCOMM_ROUNDED float roundedProduct(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

LOWCOMM_ROUNDED float squareRoot(float x) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

#undef LOWCOMM_ROUNDED

}  // namespace lowcomm
