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
#include "codec/level_table.h"
#include "errors.h"
#include "kernels/isa/table.h"

namespace lowcomm::test {

using Bytes = std::vector<std::byte>;

// Every kernel form of this machine: tests of a codec run under each.
inline std::vector<const KernelTable*> allForms() {
  size_t count = 0;
  const KernelTable* const* forms = kernelForms(&count);
  return {forms, forms + count};
}

// Tests that run under every kernel form of this machine:
//   class Name : public test::EveryForm {};
//   INSTANTIATE_TEST_SUITE_P(Forms, Name, testing::ValuesIn(test::allForms()), test::formName);
inline std::string formName(const testing::TestParamInfo<const KernelTable*>& info) {
  return info.param->name;
}

inline GridCodec gridCodec(const std::string& text, const KernelTable& form) {
  return GridCodec(CodecSpec::parse(text), form);
}

inline std::shared_ptr<const Codec> codecOf(const std::string& text, const KernelTable& form) {
  return makeCodec(CodecSpec::parse(text), form);
}

// The values of a level table that are those of an even grid.
inline std::vector<float> evenLevels(int bits) {
  std::vector<float> values(size_t{1} << bits);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(i) / static_cast<float>(values.size() - 1);
  return values;
}

// With even levels, where the codec needs a table.
inline std::shared_ptr<const Codec> codecWithTable(const std::string& text, const KernelTable& form) {
  const auto codec = codecOf(text, form);
  return needsTable(codec->spec()) ? codec->with(LevelTable(evenLevels(codec->spec().bits))) : codec;
}

class EveryForm : public testing::TestWithParam<const KernelTable*> {
 protected:
  GridCodec codec(const std::string& text) const { return gridCodec(text, *GetParam()); }
  GridCodec reference(const GridCodec& codec) const { return gridCodec(codec.spec().str(), *scalarKernels()); }
  // Of any family.
  std::shared_ptr<const Codec> anyCodec(const std::string& text) const { return codecWithTable(text, *GetParam()); }
};

// `text` with one more option.
inline std::string withOption(const std::string& text, const std::string& option) {
  return text + (text.find(':') == std::string::npos ? ":" : ",") + option;
}

// An element of one of the three types that codecs take.
inline float toFloat(DType dtype, const std::byte* element) {
  uint16_t half;
  std::memcpy(&half, element, 2);
  if (dtype == DType::float16) return float16ToFloat(half);
  if (dtype == DType::bfloat16) return bfloat16ToFloat(half);
  float value;
  std::memcpy(&value, element, 4);
  return value;
}

inline void fromFloat(DType dtype, std::byte* element, float value) {
  const uint16_t half = dtype == DType::float16 ? floatToFloat16(value) : floatToBfloat16(value);
  if (dtype == DType::float32) {
    std::memcpy(element, &value, 4);
  } else {
    std::memcpy(element, &half, 2);
  }
}

inline Bytes elementsOf(DType dtype, const std::vector<float>& x) {
  Bytes elements(x.size() * itemBytes(dtype));
  for (size_t i = 0; i < x.size(); ++i)
    fromFloat(dtype, elements.data() + i * itemBytes(dtype), x[i]);
  return elements;
}

inline std::vector<float> floatsOf(DType dtype, const Bytes& elements) {
  std::vector<float> x(elements.size() / itemBytes(dtype));
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = toFloat(dtype, elements.data() + i * itemBytes(dtype));
  return x;
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

// The number of the element for which `f` throws NonFiniteError, whose text names it.
template <class F>
uint64_t refusedElement(F&& f, std::string* what = nullptr) {
  try {
    f();
  } catch (const NonFiniteError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("element " + std::to_string(error.position)), std::string::npos) << text;
    if (what) *what = text;
    return error.position;
  }
  ADD_FAILURE() << "every element was taken";
  return ~uint64_t{0};
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

// The sizes at which packing and buckets change shape.
inline std::vector<size_t> edgeSizes(size_t bucket) {
  return {0, 1, 15, 16, 17, 63, 511, 512, 513, bucket - 1, bucket, bucket + 1, 3 * bucket + 777};
}

}  // namespace lowcomm::test
