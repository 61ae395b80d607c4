#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "kernels/grid/grid_form.h"

namespace lowcomm {

// The arithmetic of grid codecs: a bucket's scale from its statistics, then an element's code; one definition for every
// form of the loops and for the CUDA kernels (FORMAT.md, "Grid codecs"). Including files are compiled without
// contraction and with exact division (-ffp-contract=off; nvcc: -fmad=false -prec-div=true -prec-sqrt=true -ftz=false).

// An infinite quotient becomes 0, after which the ordinary formula gives every element code 0.
LOWCOMM_RULE float finiteOrZero(float quotient) {
  return quotient <= 0x1.fffffep127f ? quotient : 0.0f;
}

// Finite x to bfloat16, as a float whose lower half is 0.
inline constexpr uint32_t kBf16Mask = 0xffff0000u;
LOWCOMM_RULE float bf16Below(float x) {
  const uint32_t bits = floatBits(x);
  return floatOf((bits + (bits >> 31 ? 0xffffu : 0)) & kBf16Mask);
}
LOWCOMM_RULE float bf16Above(float x) {  // x >= 0
  return floatOf((floatBits(x) + 0xffffu) & kBf16Mask);
}
LOWCOMM_RULE float bf16Nearest(float x) {
  const uint32_t bits = floatBits(x);
  return floatOf((bits + 0x7fffu + (bits >> 16 & 1u)) & kBf16Mask);
}

// A number of metadata to its place, and back. `to` and the result are past it.
LOWCOMM_RULE std::byte* putScale(std::byte* to, float x, bool bf16) {
  if (bf16) {
    const uint32_t upper = floatBits(x) >> 16;
    __builtin_memcpy(to, &upper, 2);
    return to + 2;
  }
  __builtin_memcpy(to, &x, 4);
  return to + 4;
}
LOWCOMM_RULE float scaleAt(const std::byte* meta, size_t number, bool bf16) {
  uint32_t bits = 0;
  if (bf16) {
    __builtin_memcpy(&bits, meta + 2 * number, 2);
    return floatOf(bits << 16);
  }
  __builtin_memcpy(&bits, meta + 4 * number, 4);
  return floatOf(bits);
}

struct AffineScale {
  float base, step, inverse;
};

// `levels` is K = 2^b - 1; low and high are below kFiniteLimit in magnitude.
LOWCOMM_RULE AffineScale affineScale(float low, float high, float levels, const GridForm& form) {
  // + 0 makes -0 into +0: a range of -0 would give an inverse of -infinity, and two equal tensors different bytes.
  low += 0.0f;
  high += 0.0f;
  if (form.bf16) {
    const float base = bf16Below(low), step = bf16Above((high - base) / levels);
    return {base, step, finiteOrZero(1.0f / step)};
  }
  const float range = high - low;
  return {low, range / levels, finiteOrZero(levels / range)};
}

struct CentredScale {
  float step, inverse;
};

// `s` is the bucket's range, 0 or more and finite.
LOWCOMM_RULE CentredScale centredScale(float s, const GridForm& form) {
  float step = s / form.divisor;
  if (form.bf16) {
    step = bf16Nearest(step);
    s = step * form.divisor;
  }
  return {step, finiteOrZero(form.numerator / s)};
}

// Sums of a bucket are taken of x·2^-E, so that squares neither overflow nor vanish; E is the exponent of the largest
// magnitude, given by its bits (below those of kFiniteLimit). E = -127 where that is 0 or subnormal.
LOWCOMM_RULE float scaleDown(uint32_t largest) {
  return floatOf((254 - (largest >> 23)) << 23);  // 2^-E
}
LOWCOMM_RULE float scaleUp(uint32_t largest) {
  return floatOf(largest >> 23 ? largest >> 23 << 23 : 0x00400000u);  // 2^E
}

LOWCOMM_RULE float meanOf(float sum, size_t count, uint32_t largest) {
  return sum / static_cast<float>(count) * scaleUp(largest);
}
LOWCOMM_RULE float rmsOf(float squares, size_t count, uint32_t largest) {
  return squareRoot(squares / static_cast<float>(count)) * scaleUp(largest);
}

// A bucket's own random number, 12 bits of `word` as 15 fraction bits: odd multiples of 2^-13, so their mean is 1/2.
LOWCOMM_RULE float ditherOf(uint32_t word) {
  return static_cast<float>(((word >> 20) << 3) + 4) * 0x1p-15f;
}

// The base that a lattice codec sends: its codes are those of the unmoved one.
LOWCOMM_RULE float shiftedBase(float base, float step, float dither) {
  return base + roundedProduct(0.5f - dither, step);
}

// ---- one element ----

// The arithmetic of one element, once for the scalar loops and the CUDA kernels.

inline constexpr float kNearestMagic = 256.5f;
inline constexpr float kStochasticMagic = 256.0f;
inline constexpr uint32_t kFixedExponent = 0x87u << 23;  // sign and exponent of every float in [256, 512)

// The element's distance from the bucket's base, in steps; of levels, in ranges.
LOWCOMM_RULE float gridQuotient(float x, float base, float inverse) {
  return roundedProduct(x - base, inverse);
}

// The element's place on the grid with 15 fraction bits, above kFixedExponent.
LOWCOMM_RULE uint32_t gridFixed(float x, float base, float inverse, float magic) {
  return floatBits(gridQuotient(x, base, inverse) + magic);
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

// Device: an instruction each instead of two. They differ only for a NaN, which does not come here (the largest
// magnitude tells), and between zeros, which no end is.
LOWCOMM_RULE float held(float t, float low, float high) {
#ifdef __CUDA_ARCH__
  return fminf(fmaxf(t, low), high);
#else
  t = t < low ? low : t;
  return high < t ? high : t;
#endif
}

// The place on a grid around 0, held to its ends. `inverse` is CentredScale's.
LOWCOMM_RULE uint32_t centredFixed(float x, float inverse, const GridForm& form) {
  return floatBits(held(roundedProduct(x, inverse), form.low, form.high) + form.magic);
}

LOWCOMM_RULE uint32_t signFixed(float x) {
  return x >= 0 ? 1u << 15 : 0;
}

// A code as a number: 2^23 + code is exact, and on a GPU an addition is cheaper than a conversion.
LOWCOMM_RULE float codeNumber(uint32_t code) {
  return floatOf(0x4b000000u | code) - 0x1p23f;
}

LOWCOMM_RULE float gridValue(float base, float step, uint32_t code) {
  return base + roundedProduct(step, codeNumber(code));
}

// `step` is the one sent, times form.unit.
LOWCOMM_RULE float centredValue(float centre, float step, uint32_t code) {
  return roundedProduct(codeNumber(code) - centre, step);
}

// The value of a codebook's level, which is a fraction of the bucket's range, or a multiple of its root mean square.
LOWCOMM_RULE float levelsValue(float base, float range, float level) {
  return base + roundedProduct(range, level);
}
LOWCOMM_RULE float gaussValue(float level, float step, float gain) {
  return roundedProduct(roundedProduct(level, step), gain);
}

}  // namespace lowcomm
