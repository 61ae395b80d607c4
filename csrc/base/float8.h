#pragma once

#include <cstdint>

#include "base/half.h"
#include "base/host_device.h"

namespace lowcomm {

// The 8-bit float e4m3fn (OCP 8-bit floating point specification): sign, 4 bits of exponent with bias 7, 3 of mantissa;
// subnormals in units of 2^-9, largest 448, no infinities, and 0x7f and 0xff are NaN.
inline constexpr float kFloat8Largest = 448;
inline constexpr uint8_t kFloat8Nan = 0x7f;

LOWCOMM_HOST_DEVICE inline float float8ToFloat(uint8_t code) {
  const uint32_t sign = uint32_t{code & 0x80u} << 24, magnitude = code & 0x7fu;
  if (magnitude == kFloat8Nan) return floatOf(sign | 0x7fc00000u);
  if (magnitude < 8) return floatOf(sign | floatBits(static_cast<float>(magnitude) * 0x1p-9f));
  return floatOf(sign | ((magnitude << 20) + (120u << 23)));
}

// Nearest, ties to even, of |x| <= 448.
LOWCOMM_HOST_DEVICE inline uint8_t floatToFloat8(float x) {
  const uint32_t bits = floatBits(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  // Below 2^-6 the unit is 2^-9, the last place of a float in [2^14, 2^15): the addition rounds.
  if (magnitude < 0x3c800000u) {
    return static_cast<uint8_t>(sign | (floatBits(floatOf(magnitude) + 0x1p14f) - floatBits(0x1p14f)));
  }
  return static_cast<uint8_t>(sign | ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - (120u << 23)) >> 20));
}

}  // namespace lowcomm
