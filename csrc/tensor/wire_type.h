#pragma once

#include <ATen/ATen.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

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

// How a tensor's elements travel: as numbers of their own type, or, where the wire has no such type (complex, float8),
// as bytes, of which ranks compare the caller's type and number of elements.
struct WireElements {
  explicit WireElements(const at::Tensor& tensor)
      : dtype(wireType(tensor.scalar_type())), count(static_cast<uint64_t>(tensor.numel())) {
    if (dtype != DType::opaque) return;
    type_name = c10::toString(tensor.scalar_type());
    type_elements = std::to_string(count);
    count *= tensor.element_size();
  }

  DType dtype;
  uint64_t count;  // of the wire's elements
  std::string type_name, type_elements;
};

}  // namespace lowcomm
