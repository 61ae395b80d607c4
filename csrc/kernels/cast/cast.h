#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "base/narrow_float.h"

namespace lowcomm {

// A 16-bit code at any address, odd ones too, which no uint16_t may have: payloads are aligned to nothing.
struct Code16 {
  unsigned char bytes[2];
};

// The loops of the casts (FORMAT.md, "Casts"). Every form of them gives the same bytes; called under FloatEnv.
//
// to_*: y[i] = x[i] to the nearest value of the narrower type, ties to even; magnitudes above the type's largest finite
// one become that. False when an element is NaN or infinite: y is then without meaning.
//
// from_*, add_*: y[i] = x[i], y[i] += x[i]. False when an element is NaN or infinite.
//
// copy: y[i] = x[i] of a 16-bit type whose infinity has the bits `infinity`. False when an element is that, or NaN.
struct CastKernels {
  bool (*to_float16)(Code16* y, const float* x, size_t count);
  bool (*to_bfloat16)(Code16* y, const float* x, size_t count);

  bool (*from_float16)(float* y, const Code16* x, size_t count);
  bool (*from_bfloat16)(float* y, const Code16* x, size_t count);
  bool (*add_float16)(float* y, const Code16* x, size_t count);
  bool (*add_bfloat16)(float* y, const Code16* x, size_t count);

  bool (*copy)(Code16* y, const Code16* x, size_t count, uint16_t infinity);
};

inline constexpr float kFloat16Largest = 65504;
inline constexpr float kBfloat16Largest = 0x1.fep127f;

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
