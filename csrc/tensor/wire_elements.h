#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>

#include "tensor/wire_type.h"

namespace lowcomm {

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
