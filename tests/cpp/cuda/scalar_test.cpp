// logbyte and log9 on a device against the host's codec, as grid_test.cpp has it.
#include "cuda/plain.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "codec/scalar_rules.h"
#include "cuda/plain_cases.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::elementsOf;
using test::kElementTypes;
using test::normal;
using test::PlainCase;

void encodeScalar(const cuda::Place& place, const cuda::PlainRun& run, void* payload, const void* x, uint64_t,
                  const PhiloxKey&, uint32_t*) {
  cuda::encodeScalar(place, run, payload, x);
}

constexpr test::PlainCalls kCalls{encodeScalar, cuda::decodeScalar, cuda::decodeAddScalar};
const char* const kTexts[] = {"logbyte", "log9"};

class CudaScalar : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::deviceCount() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_F(CudaScalar, EverySizeAndElementTypeEqualsTheHost) {
  for (const char* text : kTexts) {
    const PlainCase c(text, kCalls);
    for (DType dtype : kElementTypes) {
      for (size_t n : {0, 1, 2, 7, 15, 16, 17, 56, 57, 63, 64, 65, 113, 114, 455, 511, 512, 513, 1025, 5000})
        ASSERT_NO_FATAL_FAILURE(c.expectSame(normal(n, static_cast<uint32_t>(n), 3), dtype));
      for (size_t offset : {1, 2, 3, 4})
        ASSERT_NO_FATAL_FAILURE(c.expectSame(normal(1600, 3), dtype, 0, offset));
    }
    ASSERT_NO_FATAL_FAILURE(c.expectSame(normal(65 * 4 * 512 + 77, 1), DType::float32));
  }
}

// Every code, the numbers on both sides of its bounds, and those that have no number.
TEST_F(CudaScalar, EveryCode) {
  for (const char* text : kTexts) {
    const ScalarTable& table = text == kTexts[0] ? kLogByteTable : kLog9Table;
    std::vector<float> x = {0.0f, -0.0f, std::numeric_limits<float>::denorm_min(), -std::numeric_limits<float>::max()};
    for (uint32_t i = 0; i < table.last; ++i) {
      for (uint32_t near = 0; near < 3; ++near)
        x.push_back(floatOf(floatBits(table.bound[i]) - 1 + near) * (i % 2 ? 1.0f : -1.0f));
    }
    for (DType dtype : kElementTypes) {
      for (float none : {INFINITY, -INFINITY, std::numeric_limits<float>::quiet_NaN()})
        x.push_back(none);
      ASSERT_NO_FATAL_FAILURE(PlainCase(text, kCalls).expectSame(x, dtype));
    }
  }
}

TEST_F(CudaScalar, BitsThatAReaderRefuses) {
  for (const char* text : kTexts) {
    const PlainCase c(text, kCalls);
    for (size_t n : {size_t{3}, size_t{515}}) {
      const Bytes good = c.encodedHere(elementsOf(normal(n, 2), DType::float32), DType::float32, 0);
      EXPECT_FALSE(c.refusedThere(good, DType::float32, n, "as it is"));
      const size_t used = n * (text == kTexts[0] ? 8 : 9);
      size_t refusals = 0;
      for (size_t bit = used; bit < 8 * good.size(); ++bit) {
        Bytes bytes = good;
        bytes[bit / 8] ^= std::byte(1u << (bit % 8));
        refusals += c.refusedThere(bytes, DType::float32, n, std::to_string(bit));
      }
      EXPECT_EQ(refusals, 8 * good.size() - used) << text;
    }
  }
}

TEST_F(CudaScalar, RunsThatAreNoScalars) {
  try {
    cuda::encodeScalar({}, {CodecSpec::parse("fp16"), DType::float32, 1}, nullptr, nullptr);
    FAIL() << "no error";
  } catch (const ValueError& error) {
    EXPECT_STREQ(error.what(), "encode scalar: codec: expected logbyte or log9, got fp16");
  }
}

}  // namespace
}  // namespace lowcomm
