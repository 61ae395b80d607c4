#pragma once

#include <cstdint>

#include "kernels/finite.h"
#include "kernels/half.h"
#include "kernels/host_device.h"

namespace lowcomm {

// What happens to one bucket's statistics and to one element: the arithmetic of FORMAT.md "Grid codecs", once for the
// scalar loops and the CUDA kernels. Who includes this compiles without contraction (-ffp-contract=off, -fmad=false).
//
// Always inlined and of internal linkage: a linker must not be able to keep the copy of a file that was compiled for
// another instruction set.
#define LOWCOMM_RULE LOWCOMM_HOST_DEVICE static inline __attribute__((always_inline))

// A product that is rounded by itself. In device code never half of a fused multiply-add, whatever the compiler is
// told.
LOWCOMM_RULE float roundedProduct(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

struct GridScale {
  float base, step, inverse;
  bool finite;  // false: a magnitude of kFiniteLimit or more. A NaN shows in the elements (isFixed), not here
};

// `levels` is K = 2^b - 1.
LOWCOMM_RULE GridScale gridScale(float low, float high, float levels) {
  const bool finite = low > -kFiniteLimit && high < kFiniteLimit;
  // + 0 makes -0 into +0: a range of -0 would give an inverse of -infinity, and two equal tensors different bytes.
  low += 0.0f;
  high += 0.0f;
  const float range = high - low;
  const float inverse = levels / range;
  return {low, range / levels, inverse <= 0x1.fffffep127f ? inverse : 0.0f, finite};
}

inline constexpr float kNearestMagic = 256.5f;
inline constexpr float kStochasticMagic = 256.0f;
inline constexpr uint32_t kFixedExponent = 0x87u << 23;  // sign and exponent of every float in [256, 512)

// The element's place on the grid with 15 fraction bits, above kFixedExponent.
LOWCOMM_RULE uint32_t gridFixed(float x, float base, float inverse, float magic) {
  return floatBits(roundedProduct(x - base, inverse) + magic);
}

// False for what a NaN or an infinity among the elements or in the scale gives.
LOWCOMM_RULE bool isFixed(uint32_t fixed) {
  return (fixed >> 23) == (kFixedExponent >> 23);
}

// Up or down at random: `draw` is the element's random byte.
LOWCOMM_RULE uint32_t withDraw(uint32_t fixed, uint32_t draw) {
  return fixed + (draw << 7) + 64;
}

LOWCOMM_RULE uint32_t gridCode(uint32_t fixed, uint32_t top) {
  return (fixed >> 15) & top;
}

LOWCOMM_RULE float gridValue(float base, float step, uint32_t code) {
  return base + roundedProduct(step, static_cast<float>(code));
}

#undef LOWCOMM_RULE

}  // namespace lowcomm
