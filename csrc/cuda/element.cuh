#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "base/dtype.h"
#include "base/narrow_float.h"
#include "kernels/finite.h"

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

// A float16 element that may be NaN: its payload is kept, as in the integer form.
struct AnyFloat16 {
  uint16_t bits;
};
__device__ inline float toFloat(AnyFloat16 x) {
  return (x.bits & 0x7c00u) == 0x7c00u ? float16ToFloat(x.bits) : toFloat(Float16{x.bits});
}

// Rounded to nearest even; of NaN, only the one that poisoned elements decode to.
__device__ inline void fromFloat(float& y, float x) {
  y = x;
}
__device__ inline void fromFloat(Bfloat16& y, float x) {
  y.bits = floatToBfloat16(x);
}
__device__ inline void fromFloat(Float16& y, float x) {
  y.bits = floatToFloat16(x);
}

// x, and for every NaN the one that the host's sums end with: the device's arithmetic makes one of its own.
__device__ inline float settled(float x) {
  return x == x ? x : floatOf(kPoison);
}

// Two by one instruction; the bits of NaN, which the device has ideas of its own about, are for the caller. The
// simulator runs the integer forms.
__device__ inline uint32_t pairOf(Bfloat16, float low, float high) {
#ifdef __CUDA_ARCH__
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return floatToBfloat16(low) | uint32_t{floatToBfloat16(high)} << 16;
#endif
}
__device__ inline uint32_t pairOf(Float16, float low, float high) {
#ifdef __CUDA_ARCH__
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return floatToFloat16(low) | uint32_t{floatToFloat16(high)} << 16;
#endif
}

// On the host: f(x as a pointer to elements of that type), one of those that codecs encode.
template <class F>
void withElements(DType dtype, const void* x, F&& f) {
  if (dtype == DType::float16) return f(static_cast<const Float16*>(x));
  if (dtype == DType::bfloat16) return f(static_cast<const Bfloat16*>(x));
  f(static_cast<const float*>(x));
}
template <class F>
void withElements(DType dtype, void* x, F&& f) {
  if (dtype == DType::float16) return f(static_cast<Float16*>(x));
  if (dtype == DType::bfloat16) return f(static_cast<Bfloat16*>(x));
  f(static_cast<float*>(x));
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
  uint2 four{pairOf(T{}, x[0], x[1]), pairOf(T{}, x[2], x[3])};
  if (x[0] != x[0]) {  // poisoned: all of the bucket is NaN, and nothing else is
    T poison;
    fromFloat(poison, x[0]);
    four.x = four.y = poison.bits * 0x10001u;
  }
  __stwb(reinterpret_cast<uint2*>(y), four);
}

}  // namespace lowcomm::cuda
