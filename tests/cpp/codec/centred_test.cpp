// The codecs around 0 (sym, mid, sign1), under every kernel form: levels and steps. Their bounds are bounds_test.cpp's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/narrow_float.h"
#include "codec/grid_laws.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using namespace test;

class CentredCodecs : public test::EveryForm {};

INSTANTIATE_TEST_SUITE_P(Forms, CentredCodecs, testing::ValuesIn(test::allForms()), test::formName);

float stepOf(const Bytes& payload, size_t bucket) {
  float step;
  std::memcpy(&step, payload.data() + 4 * bucket, 4);
  return step;
}

TEST_P(CentredCodecs, SizesAndLevels) {
  EXPECT_EQ(codec("sym4").encodedBytes(1537, DType::float32), 64u + 832u);
  EXPECT_EQ(codec("sign1:bucket=64").encodedBytes(1537, DType::float32), 128u + 64u * 4);
  const std::vector<float> x = {-4, -1.9f, -0.5f, 0, 0.5f, 1.9f, 2.1f, 4};
  const auto roundtrip = [&](const char* text) { return decoded(codec(text), encoded(codec(text), x), x.size()); };
  EXPECT_EQ(roundtrip("sym2"), (std::vector<float>{-4, -2, 0, 0, 0, 2, 2, 2}));
  EXPECT_EQ(roundtrip("mid2"), (std::vector<float>{-3, -1, -1, 1, 1, 1, 3, 3}));
  const float mean = (8 + 3.8f + 1 + 2.1f) / 8;
  EXPECT_EQ(roundtrip("sign1"), (std::vector<float>{-mean, -mean, -mean, mean, mean, mean, mean, mean}));
  EXPECT_EQ(roundtrip("mid1"), (std::vector<float>{-2, -2, -2, 2, 2, 2, 2, 2}));
}

// Half of the elements 3, half 1: rms = sqrt(5), so s = 4.472; what is beyond it is cut off.
TEST_P(CentredCodecs, RmsRangeCutsOff) {
  std::vector<float> x(1024, 1.0f);
  for (size_t i = 0; i < x.size(); i += 2)
    x[i] = -3;
  x[1] = 5;
  x[2] = -5;
  const double rms = std::sqrt((511 * 9.0 + 511 + 50) / 1024);
  for (const char* text : {"sym4:range=l2", "mid4:range=l2"}) {
    const GridCodec c = codec(text);
    const Bytes payload = encoded(c, x);
    const float step = stepOf(payload, 0);
    EXPECT_NEAR(step, 2 * rms / 8, 1e-6);
    const std::vector<float> y = decoded(c, payload, x.size());
    EXPECT_EQ(y[1], text[0] == 's' ? 7 * step : 7.5f * step);
    EXPECT_EQ(y[2], text[0] == 's' ? -8 * step : -7.5f * step);
  }
}

// sym and mid absmax need no clamp but sym's at the top: every largest magnitude comes out within the codes.
TEST_P(CentredCodecs, EveryLargestMagnitudeHasACode) {
  std::mt19937 generator(3);
  std::vector<float> x(64 * 1024, 0.0f);
  for (size_t i = 0; i < x.size(); i += 64) {
    x[i] = floatOf(0x3f800000u | (generator() & 0x7fffffu));
    x[i + 1] = -x[i];
  }
  for (const char* family : {"sym8", "mid8", "mid1", "sym2"}) {
    const GridCodec c = codec(test::withOption(family, "bucket=64"));
    const Bytes payload = encoded(c, x);
    const std::vector<float> y = decoded(c, payload, x.size());
    const float h = static_cast<float>(1 << (c.spec().bits - 1)), top = family[0] == 's' ? h - 1 : h - 0.5f;
    for (size_t i = 0; i < x.size(); i += 64) {
      const float step = stepOf(payload, i / 64);
      ASSERT_EQ(step, x[i] / h);
      ASSERT_EQ(y[i], top * step) << family;
      ASSERT_EQ(y[i + 1], family[0] == 's' ? -h * step : -top * step) << family;
    }
  }
}

// A reader takes any finite step. The values of a step that no writer sends are open, but all forms decode the same
// ones, except for the sign of a zero: a step of -0 is left out.
TEST_P(CentredCodecs, ForeignStepsAreReadTheSame) {
  for (const char* text :
       {"sign1:bucket=64", "sign1:axis=channel,C=1", "sym4:bucket=64", "mid3:bucket=64", "sign1:bucket=64,meta=bf16"}) {
    const auto codec = test::codecOf(text, *GetParam()), scalar = test::codecOf(text, *scalarKernels());
    Bytes payload = encoded(*codec, normal(64, 1));
    for (float step : {0x1p127f, -0x1p127f, 0x1.fep127f, -1.0f}) {
      const uint32_t bits = floatBits(step);
      if (codec->spec().meta == Meta::bf16) {
        std::memcpy(payload.data(), reinterpret_cast<const char*>(&bits) + 2, 2);
      } else {
        std::memcpy(payload.data(), &bits, 4);
      }
      const std::vector<float> y = decoded(*codec, payload, 64), z = decoded(*scalar, payload, 64);
      ASSERT_EQ(std::memcmp(y.data(), z.data(), y.size() * sizeof(float)), 0) << text << " " << step;
      std::vector<float> sum(64, 1.0f), reference = sum;
      codec->decodeAdd(sum.data(), DType::float32, payload, 0, 64);
      scalar->decodeAdd(reference.data(), DType::float32, payload, 0, 64);
      ASSERT_EQ(std::memcmp(sum.data(), reference.data(), y.size() * sizeof(float)), 0) << text << " " << step;
    }
  }
}

}  // namespace
}  // namespace lowcomm
