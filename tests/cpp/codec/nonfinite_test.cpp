// nonfinite=poison, under every kernel form.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/narrow_float.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::decoded;
using test::encoded;
using test::normal;

class NonFinite : public testing::TestWithParam<const KernelTable*> {
 protected:
  GridCodec codec(const std::string& text) const { return test::gridCodec(text, *GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Grid, NonFinite, testing::ValuesIn(test::allForms()),
                         [](const auto& info) { return std::string(info.param->name); });

const char* const kTexts[] = {"minmax4:bucket=64",
                              "minmax8:bucket=1024,meta=bf16",
                              "qsgd3:bucket=64",
                              "qsgd8:bucket=4096",
                              "lattice4:bucket=512",
                              "sym4:bucket=64",
                              "sym7:bucket=1024,meta=bf16,range=l2",
                              "mid1:bucket=256",
                              "sign1:bucket=64"};

const float kBad[] = {NAN, -NAN, INFINITY, -INFINITY, 0x1p126f, -3e38f};

// The policy changes nothing of what every codec takes.
TEST_P(NonFinite, FiniteElementsAreEncodedAsEver) {
  const std::vector<float> x = normal(5000, 1);
  for (const std::string text : kTexts) {
    const Bytes payload = encoded(codec(text), x, {1, 2, 3});
    EXPECT_EQ(payload, encoded(codec(text + ",nonfinite=poison"), x, {1, 2, 3})) << text;
  }
}

// The bucket decodes to NaN and holds nothing but it; the others are as if it held zeros.
TEST_P(NonFinite, PoisonSpoilsItsBucketAlone) {
  for (const std::string text : kTexts) {
    const GridCodec c = codec(text + ",nonfinite=poison"), plain = codec(text);
    const size_t bucket = c.spec().bucket;
    for (size_t n : {size_t{1}, size_t{17}, size_t{513}, 2 * bucket + 100}) {
      for (size_t at : {size_t{0}, size_t{16}, bucket - 1, bucket, n - 1}) {
        if (at >= n) continue;
        std::vector<float> x = normal(n, 2);
        x[at] = kBad[at % 6];
        const Bytes payload = encoded(c, x, {1, 2, 3});
        const size_t from = at / bucket * bucket, to = std::min(n, from + bucket);
        std::fill(x.begin() + from, x.begin() + to, 0.0f);
        const std::vector<float> expected = decoded(plain, encoded(plain, x, {1, 2, 3}), n);
        const std::vector<float> y = decoded(c, payload, n);
        for (size_t i = 0; i < n; ++i) {
          const bool poisoned = i >= from && i < to;
          ASSERT_EQ(floatBits(y[i]), poisoned ? 0x7fc00000u : floatBits(expected[i]))
              << text << " " << i << " of " << n;
        }
        // By the format: NaN where the first number of the bucket stands, 0 for the other and for all codes.
        const bool brain = c.spec().meta == Meta::bf16;
        const size_t numbers = gridFamily(c.spec().id)->centred ? 1 : 2, bytes = brain ? 2 : 4;
        const std::byte* scale = payload.data() + at / bucket * numbers * bytes;
        EXPECT_EQ(scale[bytes - 1], std::byte{0x7f});
        EXPECT_EQ(scale[bytes - 2], std::byte{0xc0});
        EXPECT_TRUE(std::all_of(scale, scale + bytes - 2, [](std::byte b) { return b == std::byte{0}; }));
        EXPECT_TRUE(std::all_of(scale + bytes, scale + bytes * numbers, [](std::byte b) { return b == std::byte{0}; }));
        const size_t words = (numbers * bytes * ((n + bucket - 1) / bucket) + 63) / 64 * 64;
        if (n <= bucket) {
          EXPECT_TRUE(
              std::all_of(payload.begin() + words, payload.end(), [](std::byte b) { return b == std::byte{0}; }));
        }
        std::vector<float> sum(n, 1.0f);
        c.decodeAdd(sum.data(), DType::float32, payload, 0, n);
        EXPECT_TRUE(std::isnan(sum[at]));
        // A reader that expects none refuses it.
        EXPECT_THROW(decoded(plain, payload, n), WireError) << text;
      }
    }
  }
}

TEST_P(NonFinite, OnlyTheOneNaNIsPoison) {
  for (const char* text : {"minmax4:bucket=64,nonfinite=poison", "sym4:bucket=64,nonfinite=poison"}) {
    const GridCodec c = codec(text);
    const Bytes good = encoded(c, normal(200, 1));
    const size_t step = text[0] == 'm' ? 4 : 0;
    for (uint32_t bits : {0x7f800000u, 0xff800000u, 0xffc00000u, 0x7fc00001u, 0x7fa00000u}) {
      Bytes changed = good;
      std::memcpy(changed.data() + step, &bits, 4);
      EXPECT_THROW(decoded(c, changed, 200), WireError) << text << std::hex << bits;
    }
    const uint32_t poison = 0x7fc00000u;
    Bytes changed = good;
    std::memcpy(changed.data(), &poison, 4);  // minmax's step is not 0 next to it
    if (step) {
      EXPECT_THROW(decoded(c, changed, 200), WireError) << text;
    } else {
      EXPECT_NO_THROW(decoded(c, changed, 200)) << text;
    }
  }
}

TEST_P(NonFinite, HalfElements) {
  for (const std::string text : {"minmax4:bucket=64", "sym8:bucket=4096"}) {
    for (DType dtype : {DType::float16, DType::bfloat16}) {
      const bool is_half = dtype == DType::float16;
      std::vector<uint16_t> x(9000);
      const std::vector<float> values = normal(x.size(), 3);
      for (size_t i = 0; i < x.size(); ++i)
        x[i] = is_half ? floatToFloat16(values[i]) : floatToBfloat16(values[i]);
      x[100] = is_half ? 0x7c00 : 0x7e80;  // infinity; 2^126
      x[5000] = is_half ? 0xfe00 : 0xffc0;
      std::vector<float> wide(x.size());
      for (size_t i = 0; i < x.size(); ++i)
        wide[i] = is_half ? float16ToFloat(x[i]) : bfloat16ToFloat(x[i]);
      const GridCodec c = codec(text + ",nonfinite=poison");
      EXPECT_EQ(encoded(c, x, {}, 0, dtype), encoded(c, wide)) << text;
    }
  }
}

}  // namespace
}  // namespace lowcomm
