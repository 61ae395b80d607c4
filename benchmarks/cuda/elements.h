#pragma once

// The elements that the rows encode.

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "base/narrow_float.h"
#include "codec/family.h"
#include "codec/spec.h"

namespace lowcomm {

inline std::vector<std::byte> elements(size_t count, DType dtype) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> some(1 << 16);
  for (float& x : some)
    x = normal(generator);
  std::vector<std::byte> all(count * itemBytes(dtype));
  for (size_t i = 0; i < count; ++i) {
    const float x = some[i % some.size()] * static_cast<float>(1 + i / some.size() % 7);
    if (dtype == DType::float32) reinterpret_cast<float*>(all.data())[i] = x;
    if (dtype == DType::bfloat16) reinterpret_cast<uint16_t*>(all.data())[i] = floatToBfloat16(x);
    if (dtype == DType::float16) reinterpret_cast<uint16_t*>(all.data())[i] = floatToFloat16(x);
  }
  return all;
}

// Whether one of two neighbouring codes is drawn for each element.
inline bool isStochastic(const CodecSpec& codec) {
  const GridFamily* family = gridFamily(codec.id);
  return family != nullptr && family->rounding == Rounding::stochastic;
}

inline std::vector<std::byte> bytesOf(const std::vector<float>& x) {
  const auto* bytes = reinterpret_cast<const std::byte*>(x.data());
  return {bytes, bytes + x.size() * 4};
}

}  // namespace lowcomm
