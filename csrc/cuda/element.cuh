#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/half.h"

namespace lowcomm::cuda {

// The 16-bit element types. cuda_fp16.h has its own, and takes a second to read.
struct Float16 {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

__device__ inline float toFloat(float x) {
  return x;
}

__device__ inline float toFloat(Bfloat16 x) {
  return bfloat16ToFloat(x.bits);
}

// float16 by the device's own instruction: the integer form, with its branches, would cost more than the element's
// traffic. Both agree on everything but the payload of a NaN: encoders refuse NaN, and decoders have none (base and
// step are finite). The simulator runs the integer form.
__device__ inline float toFloat(Float16 x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  return float16ToFloat(x.bits);
#endif
}

__device__ inline void fromFloat(float& y, float x) {
  y = x;
}

__device__ inline void fromFloat(Bfloat16& y, float x) {
  y.bits = floatToBfloat16(x);
}

__device__ inline void fromFloat(Float16& y, float x) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  y.bits = floatToFloat16(x);
#endif
}

// Four neighbouring elements, moved by one instruction.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

}  // namespace lowcomm::cuda
