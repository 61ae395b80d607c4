#include "base/narrow_float.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "grid_cases.h"

namespace lowcomm {
namespace {

std::vector<uint16_t> allHalves() {
  std::vector<uint16_t> x(65536);
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<uint16_t>(i);
  return x;
}

// Floats at, just under and just over every rounding boundary of a 16-bit format, and random bit patterns.
std::vector<float> boundaries(float (*widen)(uint16_t)) {
  std::vector<float> x;
  for (uint32_t h = 0; h < 65536; ++h) {
    const float value = widen(static_cast<uint16_t>(h));
    if (!std::isfinite(value)) continue;
    const float next = widen(static_cast<uint16_t>(h + 1));
    const float tie = std::isfinite(next) ? value / 2 + next / 2 : value;
    for (float v : {value, tie}) {
      x.insert(x.end(), {v, std::nextafter(v, -INFINITY), std::nextafter(v, INFINITY)});
    }
  }
  std::mt19937 generator(1);
  for (int i = 0; i < 100000; ++i)
    x.push_back(floatOf(generator()));
  for (float v : {65504.0f, 65519.9f, 65520.0f, 65536.0f, 1e-8f, 0x1p-25f, 0x1.000002p-25f, 0x1p-149f, INFINITY}) {
    x.insert(x.end(), {v, -v});
  }
  return x;
}

TEST(Half, WideningKnownValues) {
  EXPECT_EQ(float16ToFloat(0x3c00), 1.0f);
  EXPECT_EQ(float16ToFloat(0x0001), 0x1p-24f);
  EXPECT_EQ(float16ToFloat(0x03ff), 0x3ffp-24f);
  EXPECT_EQ(float16ToFloat(0x7bff), 65504.0f);
  EXPECT_TRUE(std::isnan(float16ToFloat(0x7c01)));
  EXPECT_EQ(floatBits(float16ToFloat(0x8000)), 0x80000000u);
  EXPECT_EQ(bfloat16ToFloat(0x3f80), 1.0f);
}

TEST(Half, NarrowingIsNearestEven) {
  EXPECT_EQ(floatToFloat16(65519.996f), 0x7bff);
  EXPECT_EQ(floatToFloat16(65520.0f), 0x7c00);
  EXPECT_EQ(floatToFloat16(0x1p-25f), 0x0000);
  EXPECT_EQ(floatToFloat16(0x1.000002p-25f), 0x0001);
  EXPECT_EQ(floatToFloat16(0x1.8p-24f), 0x0002);
  EXPECT_EQ(floatToBfloat16(floatOf(0x3f808000u)), 0x3f80);
  EXPECT_EQ(floatToBfloat16(floatOf(0x3f818000u)), 0x3f82);
  EXPECT_EQ(floatToBfloat16(floatOf(0x7f7fffffu)), 0x7f80);
  for (uint32_t h = 0; h < 65536; ++h) {
    const auto half = static_cast<uint16_t>(h);
    if (!std::isnan(float16ToFloat(half))) {
      EXPECT_EQ(floatToFloat16(float16ToFloat(half)), half);
    }
    if (!std::isnan(bfloat16ToFloat(half))) {
      EXPECT_EQ(floatToBfloat16(bfloat16ToFloat(half)), half);
    }
  }
}

TEST(Half, FormsAgree) {
  const std::vector<uint16_t> halves = allHalves();
  for (const KernelTable* form : test::allForms()) {
    std::vector<float> wide(halves.size());
    form->float16_to_float(wide.data(), halves.data(), wide.size());
    for (size_t i = 0; i < wide.size(); ++i)
      ASSERT_EQ(floatBits(wide[i]), floatBits(float16ToFloat(halves[i])));
    form->bfloat16_to_float(wide.data(), halves.data(), wide.size());
    for (size_t i = 0; i < wide.size(); ++i)
      ASSERT_EQ(floatBits(wide[i]), floatBits(bfloat16ToFloat(halves[i])));

    std::vector<float> x = boundaries(float16ToFloat);
    std::vector<uint16_t> narrow(x.size());
    form->float_to_float16(narrow.data(), x.data(), x.size());
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(narrow[i], floatToFloat16(x[i])) << form->name << " " << x[i];
    x = boundaries(bfloat16ToFloat);
    narrow.resize(x.size());
    form->float_to_bfloat16(narrow.data(), x.data(), x.size());
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(narrow[i], floatToBfloat16(x[i])) << form->name << " " << x[i];
  }
}

}  // namespace
}  // namespace lowcomm
