// The laws of the codecs around 0 (sym, mid, sign1), under every kernel form.
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

constexpr const char* kFamilies[] = {"sym2", "sym3",          "sym4",          "sym5",          "sym6", "sym7", "sym8",
                                     "mid1", "mid2",          "mid3",          "mid4",          "mid5", "mid6", "mid7",
                                     "mid8", "sym2:range=l2", "sym8:range=l2", "mid1:range=l2", "sign1"};

class CentredCodecs : public test::EveryForm {
 protected:
  using EveryForm::codec;
  GridCodec codec(const std::string& text, size_t bucket) const {
    return codec(test::withOption(text, "bucket=" + std::to_string(bucket)));
  }
};

INSTANTIATE_TEST_SUITE_P(Forms, CentredCodecs, testing::ValuesIn(test::allForms()), test::formName);

float stepOf(const Bytes& payload, size_t bucket) {
  float step;
  std::memcpy(&step, payload.data() + 4 * bucket, 4);
  return step;
}

// The largest error that the codec states for x in a bucket with this step and largest magnitude; infinite where it
// states none.
double boundOf(const CodecSpec& spec, float x, double step, float largest) {
  const double h = 1 << (spec.bits - 1);
  const double rounding = double{std::nextafter(largest, INFINITY)} - largest;
  const bool cut = std::fabs(x) > h * step;
  if (spec.id == CodecId::sign1) return std::max(std::fabs(double{x}), step);
  if (spec.range == Range::l2 && cut) return INFINITY;
  if (spec.id == CodecId::sym && x > (h - 0.5) * step) return 1.0002 * step;
  return 0.5002 * step + rounding;
}

void expectBound(const GridCodec& codec, const std::vector<float>& x, const Bytes& payload,
                 const std::vector<float>& y) {
  const size_t bucket = codec.spec().bucket;
  for (size_t from = 0; from < x.size(); from += bucket) {
    const size_t to = std::min(x.size(), from + bucket);
    float largest = 0;
    for (size_t i = from; i < to; ++i)
      largest = std::max(largest, std::fabs(x[i]));
    const double step = stepOf(payload, from / bucket);
    for (size_t i = from; i < to; ++i) {
      ASSERT_LE(std::fabs(double{y[i]} - x[i]), boundOf(codec.spec(), x[i], step, largest))
          << codec.spec().str() << " element " << i << " of " << x.size();
    }
  }
}

TEST_P(CentredCodecs, RoundTripWithinBoundAndEqualToReference) {
  for (size_t bucket : {64, 128, 512, 1024, 4096, 65536}) {
    for (size_t n : test::edgeSizes(bucket)) {
      const std::vector<float> x = normal(n, static_cast<uint32_t>(n), 3, 0.5f);
      for (const char* family : kFamilies) {
        if (bucket == 65536 && family[3] != '4' && family[0] != 't') continue;  // the loops are those of 4096
        const GridCodec c = codec(family, bucket);
        const Bytes payload = encoded(c, x);
        const std::vector<float> y = decoded(c, payload, n);
        expectBound(c, x, payload, y);
        test::expectAsReference(c, reference(c), x, payload, y);
        if (HasFatalFailure()) return;
      }
    }
  }
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

TEST_P(CentredCodecs, DifficultRanges) {
  for (const char* family : kFamilies) {
    const GridCodec c = codec(family, 64);
    const auto check = [&](const std::vector<float>& x) {
      const Bytes payload = encoded(c, x);
      const std::vector<float> y = decoded(c, payload, x.size());
      expectBound(c, x, payload, y);
      EXPECT_EQ(payload, encoded(reference(c), x)) << family;
    };
    for (const std::vector<float>& x : test::difficultRanges())
      check(x);
    check({-0x1.fffffep125f, 0x1.fffffep125f, 0, 1});
    check(std::vector<float>(100, 0x1.fffffep125f));
    check(std::vector<float>(100, 3.25f));
    check(std::vector<float>(100, -3.25f));

    test::expectZerosAreZeros(c);

    // Subnormal ranges, also those whose inverse is infinite: no error above the range itself.
    for (float range : {0x1p-149f, 0x1p-140f, 0x1p-128f, 0x1.8p-127f, 0x1p-126f, 0x1p-122f}) {
      std::vector<float> x(64, 0.0f);
      x[3] = range;
      x[5] = -range;
      const Bytes payload = encoded(c, x);
      EXPECT_EQ(payload, encoded(reference(c), x)) << family << range;
      const std::vector<float> y = decoded(c, payload, 64);
      for (size_t i = 0; i < 64; ++i)
        EXPECT_LE(std::fabs(double{y[i]} - x[i]), (family[0] == 'm' ? 1.5 : 1) * range)
            << family << " " << range << " element " << i;
    }
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
    const GridCodec c = codec(family, 64);
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
