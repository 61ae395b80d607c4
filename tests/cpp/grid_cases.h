#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/narrow_float.h"
#include "codec/grid.h"
#include "kernels/isa/table.h"

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

// The payload that `codec` makes of x, and its decoded values, are the reference's to the bit, and decodeAdd adds them.
inline void expectAsReference(const Codec& codec, const Codec& reference, const std::vector<float>& x,
                              const Bytes& payload, const std::vector<float>& y, const Draws& draws = {},
                              uint64_t first = 0) {
  const size_t n = x.size();
  SCOPED_TRACE(codec.spec().str() + " of " + std::to_string(n) + " from " + std::to_string(first));
  ASSERT_EQ(payload, encoded(reference, x, draws, first));
  const std::vector<float> expected = decoded(reference, payload, n, first);
  ASSERT_TRUE(n == 0 || std::memcmp(y.data(), expected.data(), n * sizeof(float)) == 0);
  std::vector<float> sum = x, sum_expected = x;
  codec.decodeAdd(sum.data(), DType::float32, payload, first, n);
  for (size_t i = 0; i < n; ++i)
    sum_expected[i] += y[i];
  ASSERT_EQ(sum, sum_expected);
}

// 16-bit elements are encoded as the floats that they are, and decoded to the nearest of the floats' values.
inline void expectConvertedFirst(const Codec& codec, size_t n) {
  SCOPED_TRACE(codec.spec().str() + " of " + std::to_string(n));
  std::vector<float> x = normal(n, 5);
  std::vector<uint16_t> narrow(n), back(n);
  for (size_t i = 0; i < n; ++i) {
    narrow[i] = floatToBfloat16(x[i]);
    x[i] = bfloat16ToFloat(narrow[i]);
  }
  const Bytes payload = encoded(codec, narrow, {}, 0, DType::bfloat16);
  ASSERT_EQ(payload, encoded(codec, x));
  const std::vector<float> y = decoded(codec, payload, n);
  codec.decode(back.data(), DType::bfloat16, payload, 0, n);
  std::vector<float> sum = x;
  codec.decodeAdd(sum.data(), DType::bfloat16, payload, 0, n);
  for (size_t i = 0; i < n; ++i) {
    ASSERT_EQ(back[i], floatToBfloat16(y[i])) << i;
    ASSERT_EQ(sum[i], x[i] + y[i]) << i;
  }
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
