// No grid codec errs by more than it states, under every kernel form.
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

class Bounds : public test::EveryForm {};

INSTANTIATE_TEST_SUITE_P(Forms, Bounds, testing::ValuesIn(test::allForms()), test::formName);

const Draws kDraws{11, 22, 33};

// Every width of every family, and what range=l2 and meta=bf16 change of some.
Texts everyWidth() {
  Texts texts = {"sign1",
                 "sym2:range=l2",
                 "sym8:range=l2",
                 "mid1:range=l2",
                 "minmax1:meta=bf16",
                 "minmax2:meta=bf16",
                 "minmax4:meta=bf16",
                 "minmax7:meta=bf16",
                 "minmax8:meta=bf16",
                 "qsgd1:meta=bf16",
                 "qsgd3:meta=bf16",
                 "qsgd4:meta=bf16",
                 "qsgd8:meta=bf16",
                 "sym2:meta=bf16",
                 "sym4:meta=bf16",
                 "sym8:meta=bf16",
                 "mid1:meta=bf16",
                 "mid4:meta=bf16",
                 "mid6:meta=bf16",
                 "mid8:meta=bf16",
                 "sign1:meta=bf16"};
  for (const char* family : {"minmax", "qsgd", "lattice", "sym", "mid"}) {
    for (int bits = *family == 's' ? 2 : 1; bits <= 8; ++bits)
      texts.push_back(family + std::to_string(bits));
  }
  return texts;
}

bool isCentred(const CodecSpec& spec) {
  return gridFamily(spec.id)->centred;
}

// Number i of a payload's metadata.
float number(const CodecSpec& spec, const Bytes& payload, size_t i) {
  const size_t bytes = spec.meta == Meta::bf16 ? 2 : 4;
  uint32_t bits = 0;
  std::memcpy(reinterpret_cast<char*>(&bits) + 4 - bytes, payload.data() + i * bytes, bytes);
  return floatOf(bits);
}

// The largest error that a codec states for x in a bucket with this step and largest magnitude; infinite where it
// states none. Half a step, or a whole one where it rounds stochastically and at sym's top; with meta=bf16 up to H·2^-8
// steps more outside a grid around 0.
double boundOf(const CodecSpec& spec, float x, double step, float largest) {
  const bool bf16 = spec.meta == Meta::bf16, lattice = spec.id == CodecId::lattice;
  const double ulp = double{std::nextafter(largest, INFINITY)} - largest, h = 1 << (spec.bits - 1);
  if (!isCentred(spec)) return (spec.id == CodecId::qsgd ? 1.0 : 0.5002) * step + (lattice ? 2 : 1) * ulp;
  const bool cut = std::fabs(x) > h * step;
  if (spec.id == CodecId::sign1) return std::max(std::fabs(double{x}), step);
  if (spec.range == Range::l2 && cut) return INFINITY;
  const double rounding = ulp + (bf16 && cut ? h * 0x1p-8 * step : 0);
  if (spec.id == CodecId::sym && x > (h - 0.5) * step) return 1.0002 * step + (bf16 ? rounding : 0);
  return 0.5002 * step + rounding;
}

void expectBound(const GridCodec& codec, const std::vector<float>& x, const Bytes& payload,
                 const std::vector<float>& y) {
  const CodecSpec& spec = codec.spec();
  const size_t numbers = isCentred(spec) ? 1 : 2;
  for (size_t from = 0, bucket = 0; from < x.size(); from += spec.bucket, ++bucket) {
    const size_t to = std::min<size_t>(x.size(), from + spec.bucket);
    const auto [low, high] = std::minmax_element(x.begin() + from, x.begin() + to);
    float largest = std::max(std::fabs(*low), std::fabs(*high));
    const float base = number(spec, payload, bucket * numbers);
    const double step = number(spec, payload, bucket * numbers + numbers - 1);
    if (spec.meta == Meta::bf16 && numbers == 2) {  // rounded so that no element falls off the grid
      ASSERT_LE(base, *low);
      ASSERT_GE(base + ((1 << spec.bits) - 1) * step * (1 + 0x1p-22), double{*high});
      largest = std::max(largest, std::fabs(base));
    }
    for (size_t i = from; i < to; ++i) {
      ASSERT_LE(std::fabs(double{y[i]} - x[i]), boundOf(spec, x[i], step, largest))
          << spec.str() << " element " << i << " of " << x.size();
    }
  }
}

TEST_P(Bounds, RoundTripWithinBoundAndEqualToReference) {
  for (size_t bucket : {64, 128, 256, 512, 1024, 4096, 65536}) {
    for (size_t n : test::edgeSizes(bucket)) {
      const std::vector<float> x = normal(n, static_cast<uint32_t>(n), 3, 0.5f);
      for (const std::string& text : everyWidth()) {
        const GridCodec c = codec(test::withOption(text, "bucket=" + std::to_string(bucket)));
        const int bits = c.spec().bits;
        if (bucket == 65536 && bits != 4 && bits != 7) continue;  // the loops are those of 4096
        const Bytes payload = encoded(c, x, kDraws);
        const std::vector<float> y = decoded(c, payload, n);
        expectBound(c, x, payload, y);
        test::expectAsReference(c, reference(c), x, payload, y, kDraws);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Bounds, DifficultRanges) {
  constexpr float kMost = 0x1.fffffep125f;
  for (const std::string& text : everyWidth()) {
    SCOPED_TRACE(text);
    const GridCodec c = codec(test::withOption(text, "bucket=64")), expected = reference(c);
    const bool bf16 = c.spec().meta == Meta::bf16;
    const auto check = [&](const std::vector<float>& x) {
      const Bytes payload = encoded(c, x, kDraws);
      ASSERT_EQ(payload, encoded(expected, x, kDraws));
      expectBound(c, x, payload, decoded(c, payload, x.size()));
    };
    for (const std::vector<float>& x : test::difficultRanges())
      check(x);
    check({-kMost, kMost, 0, 1});
    for (float same : {3.25f, -3.25f, 1.0f / 3, -1.0f / 3, kMost}) {
      const std::vector<float> x(100, same);
      check(x);
      if (!isCentred(c.spec()) && !bf16) EXPECT_EQ(decoded(c, encoded(c, x, kDraws), 100), x);
    }
    test::expectZerosAreZeros(c);

    // Subnormal ranges, also those whose inverse is infinite: around 0 no error above the range itself.
    for (float range : {0x1p-149f, 0x1p-140f, 0x1p-133f, 0x1p-128f, 0x1.8p-127f, 0x1p-126f, 0x1p-122f, 0x1p-120f}) {
      std::vector<float> x(64, 0.0f);
      x[3] = range;
      x[5] = -range;
      const Bytes payload = encoded(c, x, kDraws);
      ASSERT_EQ(payload, encoded(expected, x, kDraws)) << range;
      if (bf16 || !isCentred(c.spec())) continue;
      const std::vector<float> y = decoded(c, payload, 64);
      for (size_t i = 0; i < 64; ++i)
        EXPECT_LE(std::fabs(double{y[i]} - x[i]), (text[0] == 'm' ? 1.5 : 1) * range) << range << " element " << i;
    }
  }
}

TEST_P(Bounds, HalfTheMetadata) {
  EXPECT_EQ(codec("minmax4:bucket=64,meta=bf16").encodedBytes(4096, DType::float32), 256u + 2048u);
  EXPECT_EQ(codec("sym4:bucket=64,meta=bf16").encodedBytes(4096, DType::float32), 128u + 2048u);
}

}  // namespace
}  // namespace lowcomm
