#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/host_device.h"

namespace lowcomm {

// One element between fp32 and the narrower formats, round to nearest even, overflow to infinity, NaN made quiet: what
// the hardware conversions do, in integers, so that it holds without them and under any floating point control.

LOWCOMM_HOST_DEVICE inline float bfloat16ToFloat(uint16_t h) {
  return floatOf(uint32_t{h} << 16);
}

LOWCOMM_HOST_DEVICE inline uint16_t floatToBfloat16(float x) {
  const uint32_t bits = floatBits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

LOWCOMM_HOST_DEVICE inline float float16ToFloat(uint16_t h) {
  const uint32_t sign = uint32_t{h & 0x8000u} << 16;
  const uint32_t exponent = (h >> 10) & 31u;
  uint32_t mantissa = h & 0x3ffu;
  if (exponent == 31) return floatOf(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
  if (exponent != 0) return floatOf(sign | ((exponent + 112) << 23) | (mantissa << 13));
  if (mantissa == 0) return floatOf(sign);
  uint32_t shifted = 0;  // a subnormal half is a normal float: move its leading bit to the hidden place
  while ((mantissa & 0x400u) == 0) {
    mantissa <<= 1;
    ++shifted;
  }
  return floatOf(sign | ((113 - shifted) << 23) | ((mantissa & 0x3ffu) << 13));
}

LOWCOMM_HOST_DEVICE inline uint16_t floatToFloat16(float x) {
  const uint32_t bits = floatBits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above round to infinity
  if (magnitude >= 0x38800000u) {                                              // 2^-14: a normal half
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
  }
  if (magnitude <= 0x33000000u) return static_cast<uint16_t>(sign);  // 2^-25, a tie with 0, and below
  const uint32_t shift = 126 - (magnitude >> 23);                    // 14...24: units of 2^-24
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t half = 1u << (shift - 1);
  const uint32_t value = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1);
  return static_cast<uint16_t>(sign | (value + (rest > half || (rest == half && (value & 1u)) ? 1u : 0u)));
}

// Whether elements are of a type that codecs encode: float32, float16 or bfloat16.
constexpr bool isCoded(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
}

// Element i of x, of such a type, as a float; and a float as that element, rounded.
inline float elementAt(const void* x, DType dtype, uint64_t i) {
  if (dtype == DType::float32) return static_cast<const float*>(x)[i];
  const uint16_t half = static_cast<const uint16_t*>(x)[i];
  return dtype == DType::float16 ? float16ToFloat(half) : bfloat16ToFloat(half);
}
inline void setElement(void* x, DType dtype, uint64_t i, float value) {
  if (dtype == DType::float32) {
    static_cast<float*>(x)[i] = value;
  } else {
    static_cast<uint16_t*>(x)[i] = dtype == DType::float16 ? floatToFloat16(value) : floatToBfloat16(value);
  }
}

}  // namespace lowcomm
