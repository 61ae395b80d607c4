#include "kernels/finite.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/narrow_float.h"

namespace lowcomm {
namespace {

TEST(Finite, EveryHalfAgainstItsValue) {
  for (DType dtype : {DType::float16, DType::bfloat16}) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const uint16_t half = static_cast<uint16_t>(bits);
      const float value = dtype == DType::float16 ? float16ToFloat(half) : bfloat16ToFloat(half);
      ASSERT_EQ(firstNonFinite(&half, dtype, 1), std::abs(value) < kFiniteLimit ? -1 : 0) << value;
    }
  }
}

TEST(Finite, FirstOfSeveralAtEveryPosition) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
  for (float bad : {kNaN, -kNaN, kInfinity, -kInfinity, kFiniteLimit, -kFiniteLimit, 3e38f}) {
    for (size_t n : {1, 2, 1023, 1024, 1025, 5000}) {
      std::vector<float> x(n, std::nextafter(kFiniteLimit, 0.0f));
      x[0] = -x[0];
      EXPECT_EQ(firstNonFinite(x.data(), DType::float32, n), -1);
      for (size_t at : {n - 1, n / 2, size_t{0}}) {
        x[at] = bad;
        EXPECT_EQ(firstNonFinite(x.data(), DType::float32, n), static_cast<int64_t>(at));
      }
    }
  }
  EXPECT_EQ(firstNonFinite(nullptr, DType::float32, 0), -1);
}

TEST(Finite, OtherTypesHaveNone) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(firstNonFinite(&nan, DType::float64, 1), -1);
  EXPECT_EQ(firstNonFinite(&nan, DType::opaque, 8), -1);
}

}  // namespace
}  // namespace lowcomm
