// The CUDA kernels of rotated codecs against the scalar codec: the same bytes, the same values, the same refusals.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cuda/grid_on_device.h"

namespace lowcomm {
namespace {

using namespace test;

using CudaRotated = test::OnCuda;

// A text of every family that takes the option, with another number of bits and other options each time.
std::string textOf(const GridFamily& family, uint32_t bucket, size_t turn) {
  const int widths = family.most_bits - family.least_bits + 1,
            bits = family.least_bits + static_cast<int>(turn) % widths;
  std::string text = std::string(family.name) + std::to_string(bits) + ":bucket=" + std::to_string(bucket);
  if (family.rotation == Rotation::option) text += ",rotate=1";
  if (family.bf16() && turn / 2 % 2 == 0) text += ",meta=bf16";
  if (family.l2 && turn / 4 % 2 == 0) text += ",range=l2";
  return text;
}

// A bucket of 512 is a warp's, one of 1024 a warp's too, larger ones are a thread block's. Sizes: blocks of fewer
// elements than lanes, of lanes unlike in length, whole ones, several.
TEST_F(CudaRotated, EveryFamilyBucketAndSizeEqualsScalar) {
  size_t turn = 0;
  for (const GridFamily& family : kGridFamilies) {
    if (family.rotation == Rotation::never) continue;
    for (uint32_t bucket : {512u, 1024u, 2048u}) {
      for (size_t n : {0u, 1u, 15u, 16u, 17u, 63u, 511u, 512u, 513u, bucket - 1, bucket, bucket + 1, 2 * bucket + 777})
        ASSERT_NO_FATAL_FAILURE(expectSame(textOf(family, bucket, turn++), elements(n)));
    }
  }
}

// The reference is the codec of units, which turns the signs of the parts that it is made of.
TEST_F(CudaRotated, UnitsOfWholeBucketsTurnTheirBlocks) {
  const std::vector<float> x = elements(3 * 4096);
  for (const char* text : {"gauss4:unit=1024", "gauss2:unit=512", "gauss8:bucket=2048,unit=4096",
                           "sym4:bucket=512,rotate=1,unit=512", "qsgd4:bucket=1024,rotate=1,unit=2048"}) {
    const auto reference = test::codecOf(text, *scalarKernels());
    uint32_t refused = 0;
    const test::Bytes expected = test::encoded(*reference, x, test::kDraws);
    ASSERT_EQ(test::encodedThere(Case(text), x, DType::float32, 0, refused), expected) << text;
    const std::vector<float> y = test::decoded(*reference, expected, x.size());
    ASSERT_EQ(test::decodedThere<float>(Case(text), expected, x.size(), DType::float32, refused), y) << text;
    ASSERT_EQ(refused, 0u) << text;
  }
}

TEST_F(CudaRotated, EveryWidth) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (size_t n : {527u, 1029u}) {
      ASSERT_NO_FATAL_FAILURE(expectSame("gauss" + std::to_string(bits), elements(n)));
      ASSERT_NO_FATAL_FAILURE(expectSame("qsgd" + std::to_string(bits) + ":rotate=1", elements(n)));
    }
  }
}

// Means and extremes of a bucket whose last block lacks lanes, alone in its bucket and behind others.
TEST_F(CudaRotated, FewElementsInTheLastBlock) {
  for (const char* text : {"minmax4:bucket=512,rotate=1", "lattice3:bucket=2048,rotate=1", "sign1:rotate=1",
                           "mid4:bucket=512,range=l2,rotate=1", "sym3:bucket=2048,range=l2,rotate=1", "gauss5"}) {
    for (size_t held : {1, 3, 6, 14}) {
      for (size_t before : {0, 512}) {
        std::vector<float> x = normal(before + held, 5, 0.5f);
        // Far from 0: a lane without elements would be its bucket's minimum, and make its mean less.
        for (size_t i = before; i < x.size(); ++i)
          x[i] = 100.0f + static_cast<float>(i);
        ASSERT_NO_FATAL_FAILURE(expectSame(text, x));
      }
    }
  }
}

TEST_F(CudaRotated, LargeBucketsAndFarBlocks) {
  for (const char* text : {"minmax4:bucket=65536,rotate=1", "gauss4:bucket=16384"})
    ASSERT_NO_FATAL_FAILURE(expectSame(text, elements(17 * 1024 + 5)));
  for (const char* text : {"qsgd4:bucket=512,rotate=1", "lattice4:bucket=2048,rotate=1"}) {
    for (uint64_t block : {uint64_t{128}, test::kFarBlock})
      ASSERT_NO_FATAL_FAILURE(expectSame(text, elements(2048 + 513), block));
  }
}

TEST_F(CudaRotated, UnalignedAndSixteenBitElements) {
  for (const char* text : {"minmax4:rotate=1", "sign1:bucket=2048,rotate=1", "gauss3"}) {
    ASSERT_NO_FATAL_FAILURE(expectSame(text, elements(2999), 0, /*offset=*/1));
    for (DType dtype : {DType::float16, DType::bfloat16}) {
      for (size_t n : {1, 1024, 2575})
        ASSERT_NO_FATAL_FAILURE(expectSame(Case(text), narrowed(normal(n, 5, 1e-4f), dtype), dtype, n % 2));
    }
  }
}

TEST_F(CudaRotated, MoreThanALaunchHoldsAtOnce) {
  ASSERT_NO_FATAL_FAILURE(expectSame("gauss4", elements(65 * 4 * 512 + 777)));
}

TEST_F(CudaRotated, ZerosSubnormalsAndWideRanges) {
  const std::vector<std::vector<float>> inputs = {{-0.0f, 0.0f},
                                                  {0x1p-149f, -0x1p-149f, 0x1p-146f, 0},
                                                  {0x1.fffffep119f},
                                                  {0x1.fffffep119f, -0x1.fffffep119f, 1, 0},
                                                  {1000, 1000.0001f, 999}};
  for (const auto& few : inputs) {
    const std::vector<float> x = repeated(few);
    for (const char* text : {"minmax4:rotate=1", "lattice4:bucket=2048,rotate=1", "sym4:bucket=512,rotate=1",
                             "sign1:bucket=512,meta=bf16,rotate=1", "gauss4", "gauss8:bucket=2048,meta=fp32"})
      ASSERT_NO_FATAL_FAILURE(expectSame(text, x));
  }
}

constexpr float kBad[] = {0x1p120f, -0x1p126f, INFINITY, -INFINITY};

TEST_F(CudaRotated, ElementsAboveTheLimitAreRefused) {
  for (const char* text : {"minmax4:bucket=512,rotate=1", "gauss4", "lattice4:bucket=2048,rotate=1",
                           "sym4:bucket=2048,range=l2,rotate=1"}) {
    for (size_t at : {size_t{0}, size_t{700}, size_t{2560}}) {
      std::vector<float> x = normal(2561, 9);  // the last block has one element
      for (float bad : {kNan, -kNan, kBad[0], kBad[1], kBad[2], kBad[3]}) {
        x[at] = bad;
        ASSERT_EQ(refusedThere(Case(text), x), 1u) << bad << " at " << at << ", " << text;
      }
      x[at] = -0x1.fffffep119f;
      ASSERT_EQ(refusedThere(Case(text), x), 0u) << at << ", " << text;
    }
  }
}

// Three buckets of 512 hold one bad element each, one has no finite element, one has none that is bad.
TEST_F(CudaRotated, BucketsArePoisonedAsOnTheHost) {
  std::vector<float> x = normal(4096 + 9, 9);
  for (size_t i = 0; i < 4; ++i)
    x[i * 300 + i] = kBad[i];
  std::fill(x.begin() + 2048, x.begin() + 2560, kNan);
  x[2100] = -INFINITY;
  x.back() = kNan;
  for (const char* text : {"minmax4:bucket=512,rotate=1", "qsgd3:rotate=1", "lattice5:bucket=2048,rotate=1",
                           "sign1:bucket=2048,rotate=1", "gauss4:bucket=512", "gauss8:bucket=1024"}) {
    const Case c(std::string(text) + ",nonfinite=poison");
    ASSERT_NO_FATAL_FAILURE(expectSame(c, x));
    for (DType dtype : {DType::float16, DType::bfloat16})
      ASSERT_NO_FATAL_FAILURE(expectSame(c, narrowed(x, dtype), dtype));
  }
}

// Of a block with 5 elements, 11 lanes are unused in all of their words.
TEST_F(CudaRotated, PayloadsThatAReaderRefuses) {
  EXPECT_GT(agreedRefusals(Case("minmax3:bucket=512,rotate=1"), 5, 64, 64, 13), 56u + 3 * 11 * 32 / 13 - 1);
  EXPECT_GT(agreedRefusals(Case("gauss4"), 517, 0, 64 + 4 * 64, 29), 4u * 11 * 32 / 29 - 1);
  // All bits of a block with 16 elements are some element's.
  EXPECT_EQ(agreedRefusals(Case("gauss1"), 528, 0, 64, 29), 0u);
}

}  // namespace
}  // namespace lowcomm
