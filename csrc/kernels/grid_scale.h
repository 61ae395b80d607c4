#pragma once

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
