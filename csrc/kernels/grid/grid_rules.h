#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kernels/grid/grid_form.h"
#include "kernels/grid/grid_scale.h"

namespace lowcomm {

// What happens to one element: the arithmetic of FORMAT.md "Grid codecs", once for the scalar loops and the CUDA
// kernels. A bucket's scale is made in grid_scale.h, whose words on compilers hold here too.

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

// Of a codebook's level, which is a fraction of the bucket's range, or a multiple of its root mean square.
LOWCOMM_RULE float levelsValue(float base, float range, float level) {
  return base + roundedProduct(range, level);
}
LOWCOMM_RULE float gaussValue(float level, float step, float gain) {
  return roundedProduct(roundedProduct(level, step), gain);
}

}  // namespace lowcomm
