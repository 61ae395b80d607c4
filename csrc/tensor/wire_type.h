#pragma once

#include <c10/core/ScalarType.h>

#include "base/dtype.h"

namespace lowcomm {

// The wire's element type of a torch dtype; opaque for those that are only carried (complex, float8, quantized, ...).
constexpr DType wireType(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float:
      return DType::float32;
    case c10::ScalarType::Half:
      return DType::float16;
    case c10::ScalarType::BFloat16:
      return DType::bfloat16;
    case c10::ScalarType::Double:
      return DType::float64;
    case c10::ScalarType::Char:
      return DType::int8;
    case c10::ScalarType::Byte:
      return DType::uint8;
    case c10::ScalarType::Short:
      return DType::int16;
    case c10::ScalarType::Int:
      return DType::int32;
    case c10::ScalarType::Long:
      return DType::int64;
    case c10::ScalarType::Bool:
      return DType::boolean;
    default:
      return DType::opaque;
  }
}

}  // namespace lowcomm
