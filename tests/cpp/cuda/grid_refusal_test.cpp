// Elements and payloads that the CUDA kernels refuse, and the results under the other policies: as on the host.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cuda/grid_on_device.h"

namespace lowcomm {
namespace {

using namespace test;

using CudaRefusals = test::OnCuda;

constexpr float kBad[] = {0x1p126f, -0x1p126f, INFINITY, -INFINITY};

TEST_F(CudaRefusals, NonFiniteElementsAreRefused) {
  for (float bad : {kNan, -kNan, kBad[0], kBad[1], kBad[2], kBad[3]}) {
    for (const char* text : {"minmax4:bucket=64", "qsgd4:bucket=1024", "sym4:bucket=64", "mid4:bucket=1024,range=l2",
                             "sign1:bucket=4096"}) {
      for (size_t at : {size_t{0}, size_t{700}, size_t{5000}}) {
        std::vector<float> x = normal(5001, 9);
        x[at] = bad;
        ASSERT_EQ(refusedThere(Case(text), x), 1u) << bad << " at " << at << ", " << text;
      }
    }
  }
  const Case c("minmax4:bucket=64");
  EXPECT_EQ(refusedThere(c, std::vector<float>(600, kNan)), 1u);
  uint32_t refused = 1;  // only ever raised
  test::encodedThere(c, normal(600, 1), DType::float32, 0, refused);
  EXPECT_EQ(refused, 1u);
}

// nonfinite=poison: bytes, values and the sums they give are the host's, those of a bucket without a finite element and
// of one that begins with a NaN too.
TEST_F(CudaRefusals, BucketsArePoisonedAsOnTheHost) {
  std::vector<float> x = normal(6000, 9);
  for (size_t i = 0; i < 6; ++i)
    x[i * 700 + i] = i < 4 ? kBad[i] : kNan;
  std::fill(x.begin() + 5120, x.begin() + 5184, kNan);
  x[5130] = -INFINITY;
  x[5999] = kNan;
  for (const char* text :
       {"minmax4:bucket=64", "qsgd3:bucket=1024", "lattice5:bucket=2048", "minmax8:bucket=128,meta=bf16",
        "sym4:bucket=64", "mid3:bucket=1024,range=l2", "sym5:bucket=4096,range=l2,meta=bf16", "sign1:bucket=256"}) {
    const std::string poisons = std::string(text) + ",nonfinite=poison";
    ASSERT_NO_FATAL_FAILURE(expectSame(poisons, x));
    for (DType dtype : {DType::float16, DType::bfloat16})
      ASSERT_NO_FATAL_FAILURE(expectSame(Case(poisons), test::narrowed(x, dtype), dtype));
  }
}

TEST_F(CudaRefusals, PayloadsThatAReaderRefuses) {
  constexpr size_t kCount = 512 + 64 + 17;  // 10 buckets; the last block has 1 element in its sixth row
  EXPECT_GT(agreedRefusals(Case("minmax3:bucket=64"), kCount, 128, 128 + 3 * 64), 48u + 15 * 3);
  EXPECT_GT(agreedRefusals(Case("sym3:bucket=64"), kCount, 64, 64 + 3 * 64), 24u + 15 * 3);
  EXPECT_GT(agreedRefusals(Case("minmax3:bucket=64,meta=bf16"), kCount, 64, 64 + 3 * 64), 24u + 15 * 3);
  EXPECT_GT(agreedRefusals(Case("sign1:bucket=64,meta=bf16"), kCount, 64, 64 + 64), 44u + 15);
}

TEST_F(CudaRefusals, PoisonIsRefusedUnderOtherPolicies) {
  std::vector<float> x = normal(600, 2);
  x[70] = kNan;
  for (const char* text : {"minmax4:bucket=64", "sym4:bucket=64", "qsgd4:bucket=64,meta=bf16"}) {
    const Bytes poisoned = test::encoded(Case(text + std::string(",nonfinite=poison")).codec, x);
    uint32_t refused = 0;
    decodedThere<float>(Case(text), poisoned, x.size(), DType::float32, refused);
    EXPECT_EQ(refused, 1u) << text;
  }
}

}  // namespace
}  // namespace lowcomm
