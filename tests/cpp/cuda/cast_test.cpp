// The casts on a device against the scalar codec, as grid_test.cpp has it.
#include "cuda/plain.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "cuda/plain_cases.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::elementsOf;
using test::kElementTypes;
using test::normal;
using test::PlainCase;

constexpr test::PlainCalls kCalls{cuda::encodeCast, cuda::decodeCast, cuda::decodeAddCast};
const char* const kTexts[] = {"fp16", "bf16", "bf16:round=stochastic", "fp8e4m3"};
constexpr uint64_t kFarBlock = (uint64_t{1} << 36) / 512 * 5;

class CudaCast : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::deviceCount() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_F(CudaCast, EverySizeAndElementTypeEqualsScalar) {
  for (const char* text : kTexts) {
    const PlainCase c(text, kCalls);
    for (DType dtype : kElementTypes) {
      for (size_t n : {0, 1, 15, 16, 17, 31, 32, 33, 63, 65, 127, 511, 512, 513, 1023, 1024, 1025, 5000})
        ASSERT_NO_FATAL_FAILURE(c.expectSame(normal(n, static_cast<uint32_t>(n), 3), dtype));
    }
  }
}

TEST_F(CudaCast, UnalignedElementsAndFarBlocks) {
  for (const char* text : kTexts) {
    const PlainCase c(text, kCalls);
    for (DType dtype : kElementTypes) {
      for (size_t offset : {1, 2, 3, 4})
        ASSERT_NO_FATAL_FAILURE(c.expectSame(normal(1600, 3), dtype, 128, offset));
      ASSERT_NO_FATAL_FAILURE(c.expectSame(normal(1600, 3), dtype, kFarBlock));
    }
  }
}

TEST_F(CudaCast, MoreThanALaunchHoldsAtOnce) {
  for (const char* text : kTexts)
    ASSERT_NO_FATAL_FAILURE(PlainCase(text, kCalls).expectSame(normal(65 * 4 * 512 + 77, 1), DType::float32));
}

// Ties, subnormals and the ends of each type's range, and beyond them.
TEST_F(CudaCast, EveryKindOfNumber) {
  std::vector<float> x;
  for (uint32_t high = 0; high < 1u << 16; high += 3) {
    for (uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float value = floatOf(high << 16 | low);
      if (std::isfinite(value) && (high / 3 + low) % 5 == 0) x.push_back(value);
    }
  }
  for (float value : {448.0f, 448.1f, 464.0f, 1e30f, 65504.0f, 65519.9f, 65520.0f, 0x1.fep127f, 0x1.fefp127f,
                      0x1.ffp127f, std::numeric_limits<float>::max(), 0x1p-9f, 0x1p-10f, 0x1.8p-9f, 0x1p-24f, 0x1p-25f,
                      std::numeric_limits<float>::denorm_min(), 0.0f}) {
    x.push_back(value);
    x.push_back(-value);
  }
  for (const char* text : kTexts) {
    const PlainCase c(text, kCalls);
    ASSERT_NO_FATAL_FAILURE(c.expectSame(x, DType::float32));
    for (DType dtype : {DType::float16, DType::bfloat16}) {
      std::vector<float> finite = x;
      for (float& value : finite)
        value = dtype == DType::float16 ? std::fmin(std::fmax(value, -65504.0f), 65504.0f)
                                        : std::fmin(std::fmax(value, -0x1.fep127f), 0x1.fep127f);
      ASSERT_NO_FATAL_FAILURE(c.expectSame(finite, dtype));
    }
  }
}

// Codes of one type decoded into elements of another.
TEST_F(CudaCast, EveryCodeIntoEveryElementType) {
  for (const char* text : {"fp16:nonfinite=poison", "bf16:nonfinite=poison", "fp8e4m3:nonfinite=poison"}) {
    const PlainCase c(text, kCalls);
    const size_t item = c.codec->spec().id == CodecId::fp8e4m3 ? 1 : 2, n = item == 1 ? 256 : 65536;
    Bytes codes(n * item);
    for (size_t i = 0; i < n; ++i)
      std::memcpy(codes.data() + i * item, &i, item);
    for (DType dtype : kElementTypes) {
      // A code that a reader refuses stands for 0, or none could be compared.
      Bytes good = codes;
      for (size_t i = 0; i < n; ++i) {
        const uint32_t magnitude = static_cast<uint32_t>(i) & (item == 1 ? 0x7fu : 0x7fffu);
        const uint32_t infinity = item == 1 ? 0x7f : c.codec->spec().id == CodecId::fp16 ? 0x7c00 : 0x7f80;
        const uint32_t nan = item == 1 ? 0x7f : c.codec->spec().id == CodecId::fp16 ? 0x7e00 : 0x7fc0;
        if (magnitude >= infinity && i != nan) std::memset(good.data() + i * item, 0, item);
      }
      uint32_t refused = 0;
      ASSERT_EQ(c.decodedThere(good, dtype, n, refused), c.decodedHere(good, dtype, n)) << text << dtypeName(dtype);
      ASSERT_EQ(refused, 0u);
      ASSERT_TRUE(c.refusedThere(codes, dtype, n, "every code"));
    }
  }
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST_F(CudaCast, NonFiniteElements) {
  for (const char* name : kTexts) {
    const std::string text = name + std::string(std::string(name).find(':') == std::string::npos ? ":" : ",");
    for (DType dtype : kElementTypes) {
      std::vector<float> x = normal(1300, 5);
      x[0] = kNan;
      x[3] = INFINITY;
      x[700] = -INFINITY;
      x[1024] = -kNan;
      x[1299] = INFINITY;
      ASSERT_NO_FATAL_FAILURE(PlainCase(text + "nonfinite=saturate", kCalls).expectSame(x, dtype));
      ASSERT_NO_FATAL_FAILURE(PlainCase(text + "nonfinite=poison", kCalls).expectSame(x, dtype));
      for (float bad : {kNan, -kNan, INFINITY, -INFINITY}) {
        for (size_t at : {size_t{0}, size_t{600}, size_t{1299}}) {
          x = normal(1300, 5);
          x[at] = bad;
          uint32_t refused = 0;
          PlainCase(name, kCalls).encodedThere(elementsOf(x, dtype), dtype, 0, refused);
          ASSERT_EQ(refused, 1u) << name << " " << bad << " at " << at;
        }
      }
    }
  }
}

TEST_F(CudaCast, PayloadsThatAReaderRefuses) {
  for (const char* text : {"fp16", "bf16", "fp8e4m3", "fp16:nonfinite=poison", "fp8e4m3:nonfinite=poison"}) {
    const PlainCase c(text, kCalls);
    const size_t item = c.codec->spec().id == CodecId::fp8e4m3 ? 1 : 2;
    for (DType dtype : {DType::float32, DType::float16}) {
      constexpr size_t kCount = 520;
      const Bytes good = c.encodedHere(elementsOf(normal(kCount, 2), dtype), dtype, 0);
      EXPECT_FALSE(c.refusedThere(good, dtype, kCount, "as it is"));
      size_t refusals = 0;
      for (size_t i = kCount * item; i < good.size(); ++i) {
        Bytes bytes = good;
        bytes[i] = std::byte{1};
        refusals += c.refusedThere(bytes, dtype, kCount, "padding");
      }
      EXPECT_EQ(refusals, good.size() - kCount * item);
      refusals = 0;
      for (uint32_t code : {0x7c00u, 0xfc00u, 0x7e00u, 0xfe00u, 0x7f80u, 0x7fc0u, 0xffffu, 0x7f7fu}) {
        Bytes bytes = good;
        std::memcpy(bytes.data() + 511 * item, &code, item);
        refusals += c.refusedThere(bytes, dtype, kCount, std::to_string(code));
      }
      EXPECT_GT(refusals, 0u);
    }
  }
}

TEST_F(CudaCast, RunsThatAreNoCasts) {
  alignas(16) static std::byte payload[64];
  uint32_t refused = 0;
  float y[16] = {};
  const auto of = [&](const char* text, DType dtype, void* at) -> std::string {
    try {
      cuda::decodeCast({}, {CodecSpec::parse(text), dtype, 1}, y, at, &refused);
    } catch (const std::exception& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(of("minmax4", DType::float32, payload),
            "decode cast: codec: expected fp16, bf16 or fp8e4m3, got " + CodecSpec::parse("minmax4").str());
  EXPECT_EQ(of("fp16", DType::float64, payload),
            "decode cast: elements: expected float32, float16 or bfloat16, got float64");
  EXPECT_EQ(of("fp16", DType::float32, payload + 8),
            "decode cast: payload: expected an address that is a multiple of 16, got 8 more");
}

}  // namespace
}  // namespace lowcomm
