#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/grid_form.h"

namespace lowcomm {

// A bucket's scale from its statistics, one definition for every form of the loops (FORMAT.md, "Grid codecs").
//
// Always inlined and of internal linkage: files compiled for different instruction sets include this, and the linker
// must not be able to keep one's copy for all.
#define LOWCOMM_SCALE static inline __attribute__((always_inline))

// An infinite quotient becomes 0, after which the ordinary formula gives every element code 0.
LOWCOMM_SCALE float finiteOrZero(float quotient) {
  return quotient <= 0x1.fffffep127f ? quotient : 0.0f;
}

struct AffineScale {
  float base, step, inverse;
  bool fits;  // false where the range is above what `delta` spans
};

// `levels` is K = 2^b - 1; low and high are below kFiniteLimit in magnitude.
LOWCOMM_SCALE AffineScale affineScale(float low, float high, float levels, const GridForm& form) {
  // + 0 makes -0 into +0: a range of -0 would give an inverse of -infinity, and two equal tensors different bytes.
  low += 0.0f;
  high += 0.0f;
  const float range = high - low;
  if (form.delta != 0) {
    return {low, form.delta, finiteOrZero(1.0f / form.delta), range <= levels * form.delta};
  }
  return {low, range / levels, finiteOrZero(levels / range), true};
}

struct CentredScale {
  float step, inverse;
};

// `s` is the bucket's range, 0 or more and finite.
LOWCOMM_SCALE CentredScale centredScale(float s, const GridForm& form) {
  return {s / form.divisor, finiteOrZero(form.numerator / s)};
}

LOWCOMM_SCALE float floatFrom(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

// Sums of a bucket are taken of x·2^-E, so that squares neither overflow nor vanish; E is the exponent of the largest
// magnitude, given by its bits (below those of kFiniteLimit). E = -127 where that is 0 or subnormal.
LOWCOMM_SCALE float scaleDown(uint32_t largest) {
  return floatFrom((254 - (largest >> 23)) << 23);  // 2^-E
}
LOWCOMM_SCALE float scaleUp(uint32_t largest) {
  return floatFrom(largest >> 23 ? largest >> 23 << 23 : 0x00400000u);  // 2^E
}

LOWCOMM_SCALE float meanOf(float sum, size_t count, uint32_t largest) {
  return sum / static_cast<float>(count) * scaleUp(largest);
}
LOWCOMM_SCALE float rmsOf(float squares, size_t count, uint32_t largest) {
  return __builtin_sqrtf(squares / static_cast<float>(count)) * scaleUp(largest);
}

// A bucket's own random number, 12 bits of `word` as 15 fraction bits: odd multiples of 2^-13, so their mean is 1/2.
LOWCOMM_SCALE float ditherOf(uint32_t word) {
  return static_cast<float>(((word >> 20) << 3) + 4) * 0x1p-15f;
}

// The base that a lattice codec sends: its codes are those of the unmoved one.
LOWCOMM_SCALE float shiftedBase(float base, float step, float dither) {
  const float shift = (0.5f - dither) * step;
  return base + shift;
}

}  // namespace lowcomm
