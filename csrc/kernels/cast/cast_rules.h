#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "base/narrow_float.h"
#include "kernels/cast/cast.h"

namespace lowcomm {

// The arithmetic of one element of a cast (FORMAT.md, "Casts"), once for the scalar loops, the codec and the CUDA
// kernels.

// The codes that a poisoned element sends, the types' quiet NaNs.
inline constexpr uint16_t kFloat16Nan = 0x7e00;
inline constexpr uint16_t kBfloat16Nan = 0x7fc0;

// NaN or infinite.
LOWCOMM_RULE bool isSpecial(float x) {
  return (floatBits(x) & 0x7f800000u) == 0x7f800000u;
}

// x clamped to -largest...largest; not for NaN, which no cast takes.
LOWCOMM_RULE float heldTo(float x, float largest) {
  x = x < -largest ? -largest : x;
  return largest < x ? largest : x;
}

// heldTo() for a number of a state, in which its owner's NaN stays.
LOWCOMM_RULE float heldState(float x, float largest) {
  x = x < -largest ? -largest : x;
  return x > largest ? largest : x;
}

}  // namespace lowcomm
