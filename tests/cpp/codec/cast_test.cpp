// The casts, under every kernel form.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/narrow_float.h"
#include "grid_cases.h"
#include "kernels/cast/cast.h"

namespace lowcomm {
namespace {

using namespace test;

class Cast : public test::EveryForm {};

INSTANTIATE_TEST_SUITE_P(Casts, Cast, testing::ValuesIn(test::allForms()), test::formName);

struct Type {
  const char* text;
  float largest;
  float (*widen)(uint16_t);
};

const Type kTypes[] = {{"fp16", 65504.0f, float16ToFloat}, {"bf16", 0x1.fep127f, bfloat16ToFloat}};

// All finite values of a type, ascending.
std::vector<float> valuesOf(const Type& type) {
  std::vector<float> values;
  for (uint32_t code = 0; code < 65536; ++code) {
    const float value = type.widen(static_cast<uint16_t>(code));
    if (std::isfinite(value)) values.push_back(value);
  }
  std::sort(values.begin(), values.end());
  return values;
}

// Every value comes back as itself, every midpoint goes to the even neighbour, and what is just next to it to the
// nearer.
TEST_P(Cast, NearestTiesToEven) {
  for (const Type& type : kTypes) {
    const auto c = anyCodec(type.text);
    const std::vector<float> values = valuesOf(type);
    std::vector<float> x, expected;
    for (size_t i = 0; i < values.size(); ++i) {
      x.push_back(values[i]);
      expected.push_back(values[i]);
      if (i + 1 == values.size() || values[i] == values[i + 1]) continue;
      const float middle = values[i] / 2 + values[i + 1] / 2;
      if (values[i] / 2 * 2 != values[i] || middle == values[i] || middle == values[i + 1]) continue;  // fp32's own end
      x.insert(x.end(), {std::nextafter(middle, -INFINITY), middle, std::nextafter(middle, INFINITY)});
      const Bytes pair = encoded(*c, std::vector<float>{values[i]});
      const bool even = std::to_integer<int>(pair[0]) % 2 == 0;
      expected.insert(expected.end(), {values[i], even ? values[i] : values[i + 1], values[i + 1]});
    }
    ASSERT_GT(x.size(), 65536u);
    const std::vector<float> y = decoded(*c, encoded(*c, x), x.size());
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(y[i], expected[i]) << type.text << " of " << x[i];
  }
}

TEST_P(Cast, FiniteOverflowSaturates) {
  for (const Type& type : kTypes) {
    const auto c = anyCodec(type.text);
    for (float x : {type.largest, std::nextafter(type.largest, INFINITY), 3.4028235e38f}) {
      EXPECT_EQ(decoded(*c, encoded(*c, std::vector<float>{x, -x}), 2),
                (std::vector<float>{type.largest, -type.largest}))
          << type.text << " of " << x;
    }
  }
}

TEST_P(Cast, ElementsOfTheTypeTravelAsTheyAre) {
  for (const char* text : {"fp16", "bf16"}) {
    const DType dtype = text[0] == 'f' ? DType::float16 : DType::bfloat16;
    const auto c = anyCodec(text);
    std::vector<uint16_t> x;
    for (uint32_t code = 0; code < 65536; ++code) {
      const auto half = static_cast<uint16_t>(code);
      if (std::isfinite(dtype == DType::float16 ? float16ToFloat(half) : bfloat16ToFloat(half))) x.push_back(half);
    }
    const Bytes payload = encoded(*c, x, {1, 2, 3}, 0, dtype);
    EXPECT_EQ(std::memcmp(payload.data(), x.data(), x.size() * 2), 0) << text;
    std::vector<uint16_t> y(x.size());
    c->decode(y.data(), dtype, payload, 0, x.size());
    EXPECT_EQ(x, y) << text;

    const uint16_t infinity = dtype == DType::float16 ? 0x7c00 : 0x7f80,
                   nan = dtype == DType::float16 ? 0x7e00 : 0x7fc0;
    for (size_t at : {size_t{0}, size_t{33}, x.size() - 1}) {
      for (uint16_t bad : {infinity, static_cast<uint16_t>(infinity | 0x8001)}) {
        std::vector<uint16_t> spoilt = x;
        spoilt[at] = bad;
        EXPECT_THROW(encoded(*c, spoilt, {}, 0, dtype), NonFiniteError);
        const auto poison = anyCodec(text + std::string(":nonfinite=poison"));
        const Bytes poisoned = encoded(*poison, spoilt, {}, 0, dtype);
        EXPECT_THROW(c->decode(y.data(), dtype, poisoned, 0, x.size()), WireError);
        poison->decode(y.data(), dtype, poisoned, 0, x.size());
        EXPECT_EQ(y[at], nan);
        y[at] = x[at];
        EXPECT_EQ(x, y);
      }
    }
  }
}

// 65,504 is 65,536 in bfloat16, which float16 does not have: it stays finite.
TEST_P(Cast, ANeighbouringTypesLargestValueStaysFinite) {
  const std::vector<uint16_t> top(5, 0x7bff);
  const auto c = anyCodec("bf16");
  std::vector<uint16_t> back(5);
  c->decode(back.data(), DType::float16, encoded(*c, top, {}, 0, DType::float16), 0, 5);
  EXPECT_EQ(back, top);
}

TEST_P(Cast, PoliciesForWhatIsNotFinite) {
  for (const Type& type : kTypes) {
    const std::string text = type.text;
    for (size_t at : {0, 17, 600, 4999}) {
      for (float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
        std::vector<float> x = normal(5000, 1);
        x[at] = bad;
        x[4999] = bad;
        const auto poison = anyCodec(text + ":nonfinite=poison");
        const Bytes payload = encoded(*poison, x);
        const std::vector<float> y = decoded(*poison, payload, x.size());
        for (size_t i = 0; i < x.size(); ++i) {
          if (i == at || i == 4999) {
            ASSERT_EQ(floatBits(y[i]), 0x7fc00000u) << text;
          } else {
            ASSERT_EQ(y[i], decoded(*anyCodec(text), encoded(*anyCodec(text), std::vector<float>{x[i]}), 1)[0]);
          }
        }
        std::vector<uint16_t> half(x.size());
        poison->decode(half.data(), DType::float16, payload, 0, x.size());
        EXPECT_EQ(half[at], 0x7e00);
        EXPECT_THROW(decoded(*anyCodec(text), payload, x.size()), WireError);
        std::vector<float> sum(x.size());
        EXPECT_THROW(anyCodec(text)->decodeAdd(sum.data(), DType::float32, payload, 0, x.size()), WireError);
      }
    }
    // A magnitude that grid codecs refuse is none to refuse here.
    EXPECT_NO_THROW(encoded(*anyCodec(text), std::vector<float>{0x1p126f, -3e38f}));
  }
}

TEST_P(Cast, PayloadsThatAreNone) {
  for (const Type& type : kTypes) {
    for (const char* policy : {"", ":nonfinite=poison"}) {
      const auto c = anyCodec(type.text + std::string(policy));
      for (uint32_t code = 0; code < 65536; ++code) {
        Bytes payload(128);
        std::memcpy(payload.data() + 10, &code, 2);
        const float value = type.widen(static_cast<uint16_t>(code));
        const uint32_t nan = type.largest == 65504 ? 0x7e00 : 0x7fc0;
        if (std::isfinite(value) || (*policy && code == nan)) {
          EXPECT_EQ(floatBits(decoded(*c, payload, 64)[5]), floatBits(value));
        } else {
          EXPECT_THROW(decoded(*c, payload, 64), WireError) << type.text << " " << code;
        }
      }
    }
    const auto c = anyCodec(type.text);
    Bytes payload = encoded(*c, normal(10, 1));
    EXPECT_THROW(decoded(*c, payload, 65), WireError);
    payload.back() = std::byte{1};
    EXPECT_THROW(decoded(*c, payload, 10), WireError);
  }
}

}  // namespace
}  // namespace lowcomm
