#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "base/narrow_float.h"
#include "cuda/element.cuh"
#include "cuda/tile.cuh"
#include "kernels/cast/cast_rules.h"
#include "kernels/finite.h"
#include "kernels/grid/grid_rules.h"

namespace lowcomm::cuda {

// Where every element is coded by itself, a warp takes 512 of them in the order of memory, four fours a thread: four i
// of thread t is at element 128·i + 4·t, so that each access of a warp is one run of bytes, of 512 of them with
// float32.

struct Float8 {
  uint8_t bits;
};

__device__ inline float toFloat(Float8 x) {
  return float8ToFloat(x.bits);
}

__device__ inline uint32_t elementOfFour(uint32_t i) {
  return 128 * i + 4 * (threadIdx.x % kWarp);
}

// The thread's fours of the n elements at x; zeros for others.
template <class T>
__device__ inline void loadFours(Four<T> (&four)[4], const T* x, uint32_t n) {
  if (n == kBlock && isAligned(x, sizeof(Four<T>))) {
    for (uint32_t i = 0; i < 4; ++i)
      four[i] = *reinterpret_cast<const Four<T>*>(x + elementOfFour(i));
    return;
  }
  for (uint32_t i = 0; i < 4; ++i) {
    for (uint32_t c = 0; c < 4; ++c) {
      const uint32_t e = elementOfFour(i) + c;
      four[i].at[c] = e < n ? x[e] : T{};
    }
  }
}

// A type's largest finite number, and the code of its quiet NaN.
template <class T>
struct Narrow;
template <>
struct Narrow<Float16> {
  static constexpr float kLargest = kFloat16Largest;
  static constexpr uint16_t kNan = kFloat16Nan;
};
template <>
struct Narrow<Bfloat16> {
  static constexpr float kLargest = kBfloat16Largest;
  static constexpr uint16_t kNan = kBfloat16Nan;
};
template <>
struct Narrow<Float8> {
  static constexpr float kLargest = kFloat8Largest;
  static constexpr uint8_t kNan = kFloat8Nan;
};
template <>
struct Narrow<float> {
  static constexpr float kLargest = 0x1.fffffep127f;
};

// Four floats, held to the type's range, as four numbers of it; bit c of `nans` makes the c-th a NaN.
__device__ inline Four<float> fourOf(float, const float x[4], uint32_t nans) {
  Four<float> four;
  for (uint32_t c = 0; c < 4; ++c)
    four.at[c] = nans >> c & 1 ? floatOf(kPoison) : x[c];
  return four;
}

template <class T>
__device__ inline Four<T> fourOf(T, const float x[4], uint32_t nans) {
  float in_range[4];
  for (uint32_t c = 0; c < 4; ++c)
    in_range[c] = heldTo(x[c], Narrow<T>::kLargest);
  const uint2 bits{pairOf(T{}, in_range[0], in_range[1]), pairOf(T{}, in_range[2], in_range[3])};
  Four<T> four;
  __builtin_memcpy(&four, &bits, 8);
  if (nans != 0) {
    for (uint32_t c = 0; c < 4; ++c)
      four.at[c] = nans >> c & 1 ? T{Narrow<T>::kNan} : four.at[c];
  }
  return four;
}

// By an instruction where the device has one: as with float16, the integers would cost more than the traffic.
__device__ inline Four<Float8> fourOf(Float8, const float x[4], uint32_t nans) {
  Four<Float8> four;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
  const uint32_t bits = low | uint32_t{high} << 16;
  __builtin_memcpy(&four, &bits, 4);
#else
  for (uint32_t c = 0; c < 4; ++c)
    four.at[c] = Float8{floatToFloat8(heldTo(x[c], kFloat8Largest))};
#endif
  for (uint32_t c = 0; c < 4; ++c) {
    if (nans >> c & 1) four.at[c] = Float8{kFloat8Nan};
  }
  return four;
}

// Stored by one instruction; by intrinsic, as in element.cuh.
__device__ inline void storeFour(float* y, const Four<float>& x) {
  __stwb(reinterpret_cast<float4*>(y), float4{x.at[0], x.at[1], x.at[2], x.at[3]});
}
template <class T>
__device__ inline void storeFour(T* y, const Four<T>& x) {
  static_assert(sizeof(T) == 2);
  uint2 bits;
  __builtin_memcpy(&bits, &x, 8);
  __stwb(reinterpret_cast<uint2*>(y), bits);
}
__device__ inline void storeFour(Float8* y, const Four<Float8>& x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  __stwb(reinterpret_cast<uint32_t*>(y), bits);
}

// Four i of the n elements at y; `whole` where all 512 exist and y is aligned to four.
template <class T>
__device__ inline void putFour(T* y, uint32_t i, uint32_t n, bool whole, const Four<T>& x) {
  const uint32_t e = elementOfFour(i);
  if (whole) {
    storeFour(y + e, x);
  } else {
    for (uint32_t c = 0; c < 4; ++c) {
      if (e + c < n) y[e + c] = x.at[c];
    }
  }
}

}  // namespace lowcomm::cuda
