#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "codec/error.h"
#include "codec/grid.h"
#include "kernels/table.h"

namespace lowcomm::test {

using Bytes = std::vector<std::byte>;

// Every kernel form of this machine: tests of a codec run under each.
inline std::vector<const KernelTable*> allForms() {
  size_t count = 0;
  const KernelTable* const* forms = kernelForms(&count);
  return {forms, forms + count};
}

inline GridCodec gridCodec(const std::string& text, const KernelTable& form) {
  return GridCodec(CodecSpec::parse(text), form);
}

inline std::shared_ptr<const Codec> codecOf(const std::string& text, const KernelTable& form) {
  return makeCodec(CodecSpec::parse(text), form);
}

template <typename T>
Bytes encoded(const Codec& codec, const std::vector<T>& x, const Draws& draws = {}, uint64_t first = 0,
              DType dtype = DType::float32) {
  // Filled with ones: a byte the codec forgets to write shows.
  Bytes payload(codec.encodedBytes(x.size(), dtype), std::byte{0xff});
  codec.encode(payload, x.data(), dtype, first, x.size(), draws);
  return payload;
}

inline std::vector<float> decoded(const Codec& codec, const Bytes& payload, size_t count, uint64_t first = 0) {
  std::vector<float> y(count, -1234.5f);
  codec.decode(y.data(), DType::float32, payload, first, count);
  return y;
}

inline std::vector<float> normal(size_t count, uint32_t seed, float scale = 1, float offset = 0) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> x(count);
  for (float& v : x)
    v = distribution(generator) * scale + offset;
  return x;
}

// The values of a level table that are those of an even grid.
inline std::vector<float> evenLevels(int bits) {
  std::vector<float> values(size_t{1} << bits);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(i) / static_cast<float>(values.size() - 1);
  return values;
}

// The sizes at which packing and buckets change shape.
inline std::vector<size_t> edgeSizes(size_t bucket) {
  return {0, 1, 15, 16, 17, 63, 511, 512, 513, bucket - 1, bucket, bucket + 1, 3 * bucket + 777};
}

}  // namespace lowcomm::test
