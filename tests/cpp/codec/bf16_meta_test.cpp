// meta=bf16: half the metadata, rounded so that no element falls off the grid, under every kernel form.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/narrow_float.h"
#include "codec/grid_laws.h"

namespace lowcomm {
namespace {

using namespace test;

class Bf16Meta : public test::EveryForm {
 protected:
  GridCodec codec(const std::string& name, size_t bucket) const {
    return EveryForm::codec(name + ":bucket=" + std::to_string(bucket) + ",meta=bf16");
  }
};

INSTANTIATE_TEST_SUITE_P(Forms, Bf16Meta, testing::ValuesIn(test::allForms()), test::formName);

const char* const kNames[] = {"minmax1", "minmax2", "minmax4", "minmax7", "minmax8", "qsgd1", "qsgd3", "qsgd4", "qsgd8",
                              "sym2",    "sym4",    "sym8",    "mid1",    "mid4",    "mid6",  "mid8",  "sign1"};

float number(const Bytes& payload, size_t i) {
  uint16_t bits;
  std::memcpy(&bits, payload.data() + 2 * i, 2);
  return bfloat16ToFloat(bits);
}

float ulpOf(float magnitude) {
  return std::nextafter(magnitude, INFINITY) - magnitude;
}

// Base not above the minimum, base + K·step not below the maximum, and the bound that the codec states of the step
// sent.
void expectAffineBound(const CodecSpec& spec, const float* x, const float* y, size_t n, float base, float step) {
  const auto [low, high] = std::minmax_element(x, x + n);
  const double top = (1 << spec.bits) - 1, factor = spec.id == CodecId::minmax ? 0.5002 : 1.0;
  const float largest = std::max({std::fabs(base), std::fabs(*low), std::fabs(*high)});
  ASSERT_LE(base, *low);
  ASSERT_GE(base + top * step * (1 + 0x1p-22), double{*high});
  for (size_t i = 0; i < n; ++i)
    ASSERT_LE(std::fabs(double{y[i]} - x[i]), factor * step + ulpOf(largest)) << spec.str() << " " << i;
}

// Half a step, H·2^-8 steps more outside the grid; a step at sym's top.
void expectCentredBound(const CodecSpec& spec, const float* x, const float* y, size_t n, double step) {
  const double h = 1 << (spec.bits - 1);
  const float largest =
      std::fabs(*std::max_element(x, x + n, [](float a, float b) { return std::fabs(a) < std::fabs(b); }));
  for (size_t i = 0; i < n; ++i) {
    double bound = 0.5002 * step + ulpOf(largest) + (std::fabs(x[i]) > h * step ? h * 0x1p-8 * step : 0);
    if (spec.id == CodecId::sign1) bound = std::max(double{std::fabs(x[i])}, step);
    if (spec.id == CodecId::sym && x[i] > (h - 0.5) * step) bound += 0.5 * step;
    ASSERT_LE(std::fabs(double{y[i]} - x[i]), bound) << spec.str() << " " << i;
  }
}

void expectBound(const GridCodec& c, const std::vector<float>& x, const Bytes& payload, const std::vector<float>& y) {
  const size_t bucket = c.spec().bucket;
  for (size_t from = 0; from < x.size(); from += bucket) {
    const size_t n = std::min(bucket, x.size() - from), i = from / bucket;
    if (gridFamily(c.spec().id)->centred) {
      expectCentredBound(c.spec(), x.data() + from, y.data() + from, n, number(payload, i));
    } else {
      expectAffineBound(c.spec(), x.data() + from, y.data() + from, n, number(payload, 2 * i),
                        number(payload, 2 * i + 1));
    }
  }
}

TEST_P(Bf16Meta, RoundTripWithinBoundAndEqualToReference) {
  const Draws draws{11, 22, 33};
  for (size_t bucket : {64, 128, 512, 1024, 4096}) {
    for (size_t n : test::edgeSizes(bucket)) {
      const std::vector<float> x = normal(n, static_cast<uint32_t>(n), 3, 0.5f);
      for (const char* name : kNames) {
        const GridCodec c = codec(name, bucket);
        const Bytes payload = encoded(c, x, draws);
        const std::vector<float> y = decoded(c, payload, n);
        expectBound(c, x, payload, y);
        test::expectAsReference(c, reference(c), x, payload, y, draws);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Bf16Meta, HalfTheMetadata) {
  EXPECT_EQ(codec("minmax4", 64).encodedBytes(4096, DType::float32), 256u + 2048u);
  EXPECT_EQ(codec("sym4", 64).encodedBytes(4096, DType::float32), 128u + 2048u);
}

TEST_P(Bf16Meta, DifficultRanges) {
  for (const char* name : kNames) {
    const GridCodec c = codec(name, 64), expected = reference(c);
    const auto check = [&](const std::vector<float>& x, bool bound = true) {
      const Bytes payload = encoded(c, x, {1, 2, 3});
      ASSERT_EQ(payload, encoded(expected, x, {1, 2, 3})) << name;
      if (bound) expectBound(c, x, payload, decoded(c, payload, x.size()));
    };
    check(std::vector<float>(100, 3.25f));
    check(std::vector<float>(100, 1.0f / 3));
    check(std::vector<float>(100, -1.0f / 3));
    for (const std::vector<float>& x : test::difficultRanges())
      check(x);
    check({-0x1.fffffep125f, 0x1.fffffep125f, 0, 1});
    test::expectZerosAreZeros(c);
    for (float range : {0x1p-149f, 0x1p-140f, 0x1p-133f, 0x1.8p-128f, 0x1p-126f, 0x1p-120f}) {
      std::vector<float> x(64, 0.0f);
      x[3] = range;
      x[5] = -range;
      check(x, false);
    }
  }
}

}  // namespace
}  // namespace lowcomm
