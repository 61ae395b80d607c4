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

// Four neighbouring elements, loaded by one instruction.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

// The same stored. By intrinsic: nvcc cuts the assignment of a vector into four stores.
__device__ inline void storeFour(float* y, const float x[4]) {
  __stwb(reinterpret_cast<float4*>(y), float4{x[0], x[1], x[2], x[3]});
}

template <class T>
__device__ inline void storeFour(T* y, const float x[4]) {
  T narrow[4];
  for (int i = 0; i < 4; ++i)
    fromFloat(narrow[i], x[i]);
  const auto pair = [&](int i) { return narrow[i].bits | uint32_t{narrow[i + 1].bits} << 16; };
  __stwb(reinterpret_cast<uint2*>(y), uint2{pair(0), pair(2)});
}

}  // namespace lowcomm::cuda
