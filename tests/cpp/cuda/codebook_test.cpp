// levels and gauss by the CUDA kernels against the scalar codec: the same bytes, the same values.
#include "kernels/codebook/codebook.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cuda/grid_on_device.h"

namespace lowcomm {
namespace {

using namespace test;

using CudaCodebook = test::OnCuda;

// Many thresholds close together, a few far apart.
LevelTable unevenLevels(int bits) {
  std::mt19937 generator(3);
  std::vector<float> values(size_t{1} << bits);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = i % 4 == 0 ? static_cast<float>(i) * 0x1p-23f : static_cast<float>(generator() >> 8) * 0x1p-24f;
  std::sort(values.begin(), values.end());
  values.front() = 0;
  values.back() = 1;
  return LevelTable(values, 7);
}

std::string levelsText(int bits, uint32_t bucket) {
  return "levels" + std::to_string(bits) + ":bucket=" + std::to_string(bucket);
}

TEST_F(CudaCodebook, LevelsOfEveryWidthBucketAndSizeEqualScalar) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (uint32_t bucket : {64u, 512u, 1024u, 2048u}) {
      const Case c(levelsText(bits, bucket), bits % 2 ? LevelTable(evenLevels(bits)) : unevenLevels(bits));
      for (size_t n : test::edgeSizes(bucket))
        ASSERT_NO_FATAL_FAILURE(expectSame(c, elements(n)));
    }
  }
}

TEST_F(CudaCodebook, LevelsWithEveryOption) {
  for (const char* options : {"", ",meta=bf16", ",nonfinite=poison", ",nonfinite=poison,meta=bf16"}) {
    for (uint32_t bucket : {64u, 1024u, 65536u}) {
      const Case c(levelsText(5, bucket) + options, unevenLevels(5));
      std::vector<float> x = normal(4000, 2);
      if (c.codec.spec().nonfinite != Nonfinite::error) x[70] = x[3999] = kNan;
      ASSERT_NO_FATAL_FAILURE(expectSame(c, x, test::kFarBlock));
      ASSERT_NO_FATAL_FAILURE(expectSame(c, x, 0, /*offset=*/1));
      for (DType dtype : {DType::float16, DType::bfloat16})
        ASSERT_NO_FATAL_FAILURE(expectSame(c, narrowed(x, dtype), dtype));
    }
  }
  for (float gain : {0.001f, 1.25f, 1000.0f}) {
    const std::string text = "gauss3:meta=fp32,gain=" + std::to_string(gain);
    ASSERT_NO_FATAL_FAILURE(expectSame(text, elements(1500)));
  }
}

// Elements that are the thresholds of a bucket from 0 to 1, and the floats next to them: a tie has the lower code.
TEST_F(CudaCodebook, TiesHaveTheLowerCode) {
  for (int bits = 1; bits <= 8; ++bits) {
    const LevelTable table = unevenLevels(bits);
    std::vector<float> x = {0, 1};
    for (size_t i = 0; i + 1 < table.values().size(); ++i) {
      const float threshold = (table.values()[i] + table.values()[i + 1]) * 0.5f;
      for (float toward : {threshold, 2.0f, -1.0f})
        x.push_back(std::max(0.0f, std::nextafter(threshold, toward)));
    }
    ASSERT_NO_FATAL_FAILURE(expectSame(Case(levelsText(bits, 1024), table), x));
  }
}

TEST_F(CudaCodebook, ZerosSubnormalsAndWideRanges) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  const std::vector<std::vector<float>> inputs = {
      {-0.0f, 0.0f}, {tiny, -tiny, 5 * tiny, 0}, {0x1.fffffep125f, -0x1.fffffep125f, 1, 0}, {3.25f}};
  for (const auto& few : inputs) {
    const std::vector<float> x = repeated(few);
    for (const char* meta : {"", ",meta=bf16"})
      ASSERT_NO_FATAL_FAILURE(expectSame(Case(levelsText(4, 128) + meta, LevelTable(evenLevels(4))), x));
  }
}

TEST_F(CudaCodebook, WhatLevelsRefuse) {
  for (uint32_t bucket : {64u, 1024u, 4096u}) {
    const Case c(levelsText(4, bucket), unevenLevels(4));
    for (float bad : {kNan, -kNan, INFINITY, -0x1p126f}) {
      std::vector<float> x = normal(5001, 9);
      for (size_t at : {size_t{0}, size_t{700}, size_t{5000}}) {
        std::swap(bad, x[at]);
        ASSERT_EQ(refusedThere(c, x), 1u) << bad << " at " << at << ", bucket " << bucket;
        std::swap(bad, x[at]);
      }
    }
  }
  EXPECT_GT(agreedRefusals(Case(levelsText(3, 64), LevelTable(evenLevels(3))), 593, 128, 128 + 3 * 64, 3), 48u + 15);
}

}  // namespace
}  // namespace lowcomm
