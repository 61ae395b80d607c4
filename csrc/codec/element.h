#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/half.h"

namespace lowcomm {

// Whether elements are of a type that codecs encode: float32, float16 or bfloat16.
constexpr bool isCoded(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
}

// Element i of x, of such a type, as a float.
inline float elementAt(const void* x, DType dtype, uint64_t i) {
  if (dtype == DType::float32) return static_cast<const float*>(x)[i];
  const uint16_t half = static_cast<const uint16_t*>(x)[i];
  return dtype == DType::float16 ? float16ToFloat(half) : bfloat16ToFloat(half);
}

}  // namespace lowcomm
