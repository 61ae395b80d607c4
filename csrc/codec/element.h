#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/narrow_float.h"

namespace lowcomm {

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
