// logbyte and log9, and where their literals come from.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "base/narrow_float.h"
#include "codec/scalar_rules.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::decoded;
using test::encoded;

std::shared_ptr<const Codec> codec(const char* text) {
  return makeCodec(CodecSpec::parse(text));
}

// long double has more digits than any of these numbers needs: no tie and no near miss.
float nearest(long double x) {
  return static_cast<float>(x);
}

float leastFrom(long double x) {
  const float near = nearest(x);
  return static_cast<long double>(near) < x ? std::nextafter(near, INFINITY) : near;
}

TEST(Scalar, TablesAreWhatTheyAreSaidToBe) {
  if (sizeof(long double) == sizeof(double)) GTEST_SKIP() << "this machine's long double is a double";
  for (int e = 1; e < 128; ++e)
    EXPECT_EQ(kLogByteValues[e - 1], nearest(std::exp((e - 64) / 8.0L))) << e;
  for (int e = 2; e < 128; ++e)
    EXPECT_EQ(kLogByteBounds[e - 2], leastFrom(std::exp((e - 64.5L) / 8.0L))) << e;
  for (int u = 1; u < 256; ++u)
    EXPECT_EQ(kLog9Values[u - 1], nearest(std::exp((u - 128) / 16.0L))) << u;
  for (int u = 2; u < 256; ++u)
    EXPECT_EQ(kLog9Bounds[u - 2], leastFrom(std::exp((u - 128.5L) / 16.0L))) << u;
}

// The guess that numbers are found with is never too far off.
TEST(Scalar, NumbersAreCountsOfBounds) {
  for (const ScalarTable* table : {&kLogByteTable, &kLog9Table}) {
    const std::span<const float> bounds(table->bound, table->last);
    const auto expectCount = [&](uint32_t magnitude) {
      const auto above = std::upper_bound(bounds.begin(), bounds.end(), floatOf(magnitude));
      ASSERT_EQ(scalarNumber(*table, magnitude), 1 + (above - bounds.begin())) << floatOf(magnitude);
    };
    for (uint32_t magnitude = 1; magnitude < 0x7f800000u; magnitude += 997)
      ASSERT_NO_FATAL_FAILURE(expectCount(magnitude));
    for (float bound : bounds) {
      for (uint32_t i = 0; i < 5; ++i)
        ASSERT_NO_FATAL_FAILURE(expectCount(floatBits(bound) - 2 + i));
    }
    expectCount(1);
    expectCount(0x7f7fffffu);
  }
}

// The definition: rounded and held logarithms.
TEST(Scalar, CodesAreRoundedLogarithms) {
  std::vector<float> x = test::normal(20000, 1, 3);
  for (int exponent = -149; exponent < 128; ++exponent)
    x.push_back(std::ldexp(1.3f, exponent));
  for (bool byte : {true, false}) {
    const auto c = codec(byte ? "logbyte" : "log9");
    const Bytes payload = encoded(*c, x);
    for (size_t i = 0; i < x.size(); ++i) {
      const size_t bit = byte ? 8 * i : 9 * i;
      const uint32_t word = std::to_integer<uint32_t>(payload[bit / 8]) |
                            (byte ? 0 : std::to_integer<uint32_t>(payload[bit / 8 + 1]) << 8);
      const long double scale = byte ? 8 : 16, most = byte ? 63 : 127;
      const auto rounded = std::clamp<long double>(
          std::nearbyint(scale * std::log(static_cast<long double>(std::fabs(x[i])))), -most, most);
      const uint32_t sign = x[i] < 0 ? (byte ? 128 : 256) : 0;
      ASSERT_EQ(word >> bit % 8 & (byte ? 255u : 511u), sign + static_cast<uint32_t>(rounded + (byte ? 64 : 128)))
          << c->spec().str() << " of " << x[i];
    }
  }
}

TEST(Scalar, RelativeErrorWithinTheStatedBound) {
  std::vector<float> x;
  for (float v = 4e-4f; v < 2600; v *= 1.0003f)
    x.insert(x.end(), {v, -v});
  for (const auto& [text, bound] : {std::pair("logbyte", std::exp(1 / 16.0) - 1), {"log9", std::exp(1 / 32.0) - 1}}) {
    const std::vector<float> y = decoded(*codec(text), encoded(*codec(text), x), x.size());
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_LE(std::fabs(y[i] - x[i]), bound * 1.000001 * std::fabs(x[i])) << text << " " << x[i];
  }
}

TEST(Scalar, ZerosAndWhatIsNoNumber) {
  const std::vector<float> x = {0.0f, -0.0f, NAN, INFINITY, -INFINITY, 1e-45f, -3e38f, 1.0f};
  for (const char* text : {"logbyte", "log9"}) {
    const bool byte = text[3] == 'b';
    const std::vector<float> y = decoded(*codec(text), encoded(*codec(text), x), x.size());
    EXPECT_EQ(floatBits(y[0]), 0u);
    EXPECT_EQ(floatBits(y[1]), 0u);
    for (int i = 2; i < 5; ++i)
      EXPECT_EQ(floatBits(y[i]), 0x7fc00000u);
    EXPECT_EQ(y[5], byte ? kLogByteValues[0] : kLog9Values[0]);
    EXPECT_EQ(y[6], byte ? -kLogByteValues[126] : -kLog9Values[254]);
    EXPECT_EQ(y[7], 1.0f);
  }
  const Bytes payload = encoded(*codec("logbyte"), x);
  EXPECT_EQ(payload[0], std::byte{0});
  EXPECT_EQ(payload[1], std::byte{0});
  EXPECT_EQ(payload[2], std::byte{0x80});
  EXPECT_EQ(payload[7], std::byte{64});
}

TEST(Scalar, EveryCodeComesBackAtEverySize) {
  for (const char* text : {"logbyte", "log9"}) {
    const auto c = codec(text);
    for (size_t n : {0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 511, 512, 513, 5000}) {
      std::vector<float> x(n);
      for (size_t i = 0; i < n; ++i)
        x[i] = (i % 2 ? -1.0f : 1.0f) * (text[3] == 'b' ? kLogByteValues[i % 127] : kLog9Values[i % 255]);
      const Bytes payload = encoded(*c, x);
      EXPECT_EQ(payload.size(), ((text[3] == 'b' ? n : (9 * n + 7) / 8) + 63) / 64 * 64);
      EXPECT_EQ(decoded(*c, payload, n), x) << text << " " << n;
      std::vector<float> sum(n, 1.0f);
      c->decodeAdd(sum.data(), DType::float32, payload, 0, n);
      for (size_t i = 0; i < n; ++i)
        ASSERT_EQ(sum[i], 1.0f + x[i]);
      for (DType dtype : {DType::float16, DType::bfloat16}) {
        std::vector<uint16_t> half(n), back(n);
        c->decode(half.data(), dtype, payload, 0, n);
        for (size_t i = 0; i < n; ++i)
          ASSERT_EQ(half[i], dtype == DType::float16 ? floatToFloat16(x[i]) : floatToBfloat16(x[i]));
        c->decode(back.data(), dtype, encoded(*c, half, {}, 0, dtype), 0, n);
        EXPECT_EQ(back, half);  // rounding to a half moves no number to another code
      }
    }
  }
}

TEST(Scalar, PayloadsThatAreNone) {
  for (const char* text : {"logbyte", "log9"}) {
    const auto c = codec(text);
    const size_t n = 13;
    const Bytes good = encoded(*c, test::normal(n, 1));
    size_t carrying = 0;
    for (size_t bit = 0; bit < good.size() * 8; ++bit) {
      Bytes changed = good;
      changed[bit / 8] ^= std::byte(1 << bit % 8);
      std::vector<float> y(n);
      try {
        c->decode(y.data(), DType::float32, changed, 0, n);
        ++carrying;
      } catch (const WireError&) {
      }
    }
    EXPECT_EQ(carrying, n * (text[3] == 'b' ? 8 : 9));
    std::vector<float> y(n);
    EXPECT_THROW(c->decode(y.data(), DType::float32, std::span(good).first(63), 0, n), WireError);
    EXPECT_THROW(c->encode(std::span<std::byte>(), y.data(), DType::float32, 0, n, {}), ValueError);
    EXPECT_THROW(encoded(*c, y, {}, 0, DType::int32), TypeError);
    EXPECT_THROW(encoded(*c, y, {}, 100), ValueError);
  }
}

}  // namespace
}  // namespace lowcomm
