// The rotation and the codecs that take it, under every kernel form.
#include "kernels/codebook/codebook.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/narrow_float.h"
#include "codec/grid_laws.h"

namespace lowcomm {
namespace {

using namespace test;

class RotatedCodecs : public test::EveryForm {};

INSTANTIATE_TEST_SUITE_P(Grid, RotatedCodecs, testing::ValuesIn(test::allForms()), test::formName);

TEST(Rotation, SignsAreThoseOfTheGenerator) {
  for (uint32_t lane = 0; lane < 16; ++lane)
    EXPECT_EQ(kRotationSigns[lane], philox(lane / 4, {}).word[lane % 4]);
  EXPECT_EQ(floatBits(kRotationScale), 0x3e3504f3u);
}

// By the definition: a row of the transform is a row of the Hadamard matrix.
TEST_P(RotatedCodecs, IsASignedHadamardTransformOfEveryLane) {
  const std::vector<float> x = normal(512, 4);
  std::vector<float> y(512);
  ASSERT_TRUE(GetParam()->rotation->rotate[kAllRows](y.data(), x.data(), 512, {}));
  for (size_t e = 0; e < 512; ++e) {
    double sum = 0;
    for (size_t row = 0; row < 32; ++row) {
      const bool minus =
          (__builtin_popcount(static_cast<unsigned>(row & e / 16)) + (kRotationSigns[e % 16] >> row)) & 1;
      sum += (minus ? -1.0 : 1.0) * x[row * 16 + e % 16];
    }
    EXPECT_NEAR(y[e], sum / std::sqrt(32.0), 4e-6) << e;
  }
}

TEST_P(RotatedCodecs, ThereAndBackAndEqualToTheReference) {
  for (size_t n : test::manySizes(512)) {
    const size_t all = (n + 511) / 512 * 512;
    const std::vector<float> x = normal(n, static_cast<uint32_t>(n) + 1);
    std::vector<float> there(all, -1.0f), expected(all, -2.0f), back(n), reference(n), sum = x, in_place = x;
    ASSERT_TRUE(GetParam()->rotation->rotate[kAllRows](there.data(), x.data(), n, {}));
    ASSERT_TRUE(scalar::kRotation.rotate[kAllRows](expected.data(), x.data(), n, {}));
    ASSERT_EQ(there, expected) << n;
    in_place.resize(all, 7.0f);
    ASSERT_TRUE(GetParam()->rotation->rotate[kAllRows](in_place.data(), in_place.data(), n, {}));
    ASSERT_EQ(in_place, expected) << n;

    GetParam()->rotation->unrotate[kAllRows][0](back.data(), there.data(), n, {});
    scalar::kRotation.unrotate[kAllRows][0](reference.data(), there.data(), n, {});
    ASSERT_EQ(back, reference) << n;
    for (size_t i = 0; i < n; ++i)
      ASSERT_NEAR(back[i], x[i], 1e-6 * 4) << i << " of " << n;  // elements up to 4: 1e-6 of the largest
    GetParam()->rotation->unrotate[kAllRows][1](sum.data(), there.data(), n, {});
    for (size_t i = 0; i < n; ++i)
      ASSERT_EQ(sum[i], x[i] + back[i]) << i << " of " << n;
    in_place.resize(all);
    GetParam()->rotation->unrotate[kAllRows][0](in_place.data(), in_place.data(), n, {});
    ASSERT_TRUE(std::equal(back.begin(), back.end(), in_place.begin())) << n;
  }
}

// Sums and differences of all 16 lanes of every row, and a quarter of them.
void acrossLanes(std::vector<float>& x) {
  for (size_t apart = 1; apart < 16; apart *= 2) {
    for (size_t e = 0; e < x.size(); ++e) {
      if (e & apart) continue;
      const float a = x[e], b = x[e + apart];
      x[e] = a + b;
      x[e + apart] = a - b;
    }
  }
  for (float& value : x)
    value *= 0.25f;
}

// Blocks of units: of words of signs that turnOf() has changed, other ones each, and transformed across their lanes.
TEST_P(RotatedCodecs, UnitsTurnTheirSignsAndMixTheirLanes) {
  EXPECT_EQ(turnOf(0), 0u);
  EXPECT_EQ(turnOf(1), 0x514e28b7u);
  const size_t n = 7 * 512;
  const std::vector<float> x = normal(n, 9);
  for (int rows = 0; rows <= kAllRows; ++rows) {
    const auto rotate = GetParam()->rotation->rotate[rows];
    std::vector<float> there(n), flipped = x, expected(n), back(n), still(n);
    ASSERT_TRUE(rotate(there.data(), x.data(), n, {3, true}));
    for (size_t e = 0; e < n; ++e)
      flipped[e] = turnOf(3 + e / 512) >> e % 512 / 16 & 1 ? -x[e] : x[e];
    ASSERT_TRUE(rotate(expected.data(), flipped.data(), n, {}));
    acrossLanes(expected);
    ASSERT_EQ(there, expected) << rows;
    ASSERT_TRUE(rotate(still.data(), x.data(), n, {}));
    for (size_t at = 0; at < n; at += 512)
      EXPECT_FALSE(std::equal(still.begin() + at, still.begin() + at + 512, there.begin() + at)) << rows << " " << at;
    GetParam()->rotation->unrotate[rows][0](back.data(), there.data(), n, {3, true});
    for (size_t i = 0; i < n; ++i)
      ASSERT_NEAR(back[i], x[i], 4e-6) << rows << " " << i;
    std::vector<float> sum = x;
    GetParam()->rotation->unrotate[rows][1](sum.data(), there.data(), n, {3, true});
    for (size_t i = 0; i < n; ++i)
      ASSERT_EQ(sum[i], x[i] + back[i]) << rows << " " << i;
  }
}

// A rotated codec loses as much as its plain form loses of the rotated elements: the law of every grid codec, since
// lengths stay as they are.
TEST_P(RotatedCodecs, ErrsAsThePlainCodecDoesOfRotatedElements) {
  for (const char* text : {"minmax4", "qsgd4", "sym3", "mid2", "sign1", "minmax4:meta=bf16"}) {
    const std::string plain = std::string(text) + (std::strchr(text, ':') ? "," : ":") + "bucket=512";
    const GridCodec grid = codec(plain), c = codec(plain + ",rotate=1");
    for (size_t n : {size_t{512}, size_t{4096}}) {
      std::vector<float> x = normal(n, 6), rotated(n);
      x[100] = 40;  // a rotation spreads it over 32 rows
      ASSERT_TRUE(GetParam()->rotation->rotate[kAllRows](rotated.data(), x.data(), n, {}));
      const Bytes payload = encoded(c, x, {1, 2, 3});
      ASSERT_EQ(payload, encoded(grid, rotated, {1, 2, 3})) << plain << " " << n;
      std::vector<float> expected(n);
      GetParam()->rotation->unrotate[kAllRows][0](expected.data(), decoded(grid, payload, n).data(), n, {});
      EXPECT_EQ(decoded(c, payload, n), expected) << plain << " " << n;
    }
  }
}

// A block with fewer elements than lanes: the others neither count in its statistics nor have codes.
TEST_P(RotatedCodecs, LanesWithoutAnElement) {
  for (const std::string& text : test::kRotated) {
    const GridCodec c = codec(text);
    for (size_t held : {1, 3, 15}) {
      const size_t n = 512 + held;
      std::vector<float> x(n, 0.5f);
      for (size_t i = 512; i < n; ++i)
        x[i] = 100.0f + static_cast<float>(i);
      const Bytes payload = encoded(c, x, {1, 2, 3});
      ASSERT_EQ(payload.size(), c.encodedBytes(1024, DType::float32)) << text;
      const std::byte* words = payload.data() + payload.size() - 64 * c.spec().bits;
      for (size_t byte = 0; byte < size_t{64} * c.spec().bits; ++byte) {
        if (byte % 64 / 4 >= held) ASSERT_EQ(words[byte], std::byte{0}) << text << " byte " << byte;
      }
      Bytes changed = payload;
      changed[payload.size() - 1] = std::byte{1};
      EXPECT_THROW(decoded(c, changed, n), WireError) << text;

      // Bucket 512 alone sees the last block alone: its scale is that of the lanes which hold an element.
      if (c.spec().bucket != 512) continue;
      std::vector<float> rotated(512);
      ASSERT_TRUE(GetParam()->rotation->rotate[kAllRows](rotated.data(), x.data() + 512, held, {}));
      std::vector<float> own;
      for (size_t e = 0; e < 512; ++e) {
        if (e % 16 < held) own.push_back(rotated[e]);
      }
      const size_t numbers = gridFamily(c.spec().id)->centred ? 1 : 2;
      const size_t bytes = c.spec().meta == Meta::bf16 ? 2 : 4;
      uint32_t bits = 0;
      std::memcpy(reinterpret_cast<char*>(&bits) + 4 - bytes, payload.data() + numbers * bytes, bytes);
      const float scale = floatOf(bits);
      const auto [low, high] = std::minmax_element(own.begin(), own.end());
      const double squares = std::inner_product(own.begin(), own.end(), own.begin(), 0.0);
      const double rms = std::sqrt(squares / static_cast<double>(own.size()));
      if (numbers == 2 && c.spec().id != CodecId::lattice) {
        EXPECT_NEAR(scale, *low, std::fabs(*low) / 100) << text;
      } else if (c.spec().id == CodecId::gauss) {
        EXPECT_NEAR(scale, rms, rms / 250) << text;
      }
    }
  }
}

// Zeros, tiny and huge magnitudes.
TEST_P(RotatedCodecs, DifficultRanges) {
  for (const std::string& text : test::kRotated) {
    const GridCodec c = codec(text), expected = reference(c);
    const auto check = [&](const std::vector<float>& x) {
      const Bytes payload = encoded(c, x, {1, 2, 3});
      const std::vector<float> y = decoded(c, payload, x.size());
      test::expectAsReference(c, expected, x, payload, y, {1, 2, 3});
      for (float v : y)
        ASSERT_TRUE(std::isfinite(v)) << text << " " << x[0];
    };
    for (const std::vector<float>& x : test::difficultRanges())
      check(x);
    check(normal(700, 1, 0x1p-140f));
    check(std::vector<float>(700, 0x1.fffffep119f));
    check(std::vector<float>(700, 0x1p-149f));
    for (float v : decoded(c, encoded(c, std::vector<float>(530, -0.0f)), 530))
      ASSERT_EQ(v, 0.0f) << text;
  }
}

}  // namespace
}  // namespace lowcomm
