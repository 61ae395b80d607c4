// bucket=tensor on CUDA against the scalar codec: the same bytes, values and refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cuda/uncut_cases.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::normal;
using test::Uncut;

class CudaTensorBucket : public test::CudaUncut {};

Uncut codec(const std::string& name, const std::string& options = "") {
  return Uncut(name + ":bucket=tensor" + options);
}

TEST_F(CudaTensorBucket, EveryTextEqualsScalar) {
  const size_t sizes[] = {0, 1, 15, 16, 17, 63, 511, 512, 513, 1023, 1025, 4777};
  size_t turn = 0;
  for (const std::string& name : test::uncutTexts()) {
    const size_t colon = name.find(':');
    const std::string options = colon == std::string::npos ? "" : "," + name.substr(colon + 1);
    ASSERT_NO_FATAL_FAILURE(expectSame(codec(name.substr(0, colon), options), normal(sizes[turn++ % 12], 3)));
  }
}

TEST_F(CudaTensorBucket, EverySizeOfEveryRule) {
  for (const char* name : {"minmax4", "qsgd3", "lattice4", "sym4", "sign1"}) {
    for (size_t n : {0, 1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 2047, 2048, 2049, 2113})
      ASSERT_NO_FATAL_FAILURE(expectSame(codec(name), normal(n, 4, 2, 1)));
  }
  for (size_t n : {1, 63, 64, 65, 2047, 2048, 2049, 2113, 4200})
    ASSERT_NO_FATAL_FAILURE(expectSame(codec("mid3", ",range=l2"), normal(n, 4, 2, 1)));
}

TEST_F(CudaTensorBucket, LongTensors) {
  std::vector<float> x = normal(150001, 1);
  x[123456] = 50;
  for (const char* name : {"minmax8", "sign1"})
    ASSERT_NO_FATAL_FAILURE(expectSame(codec(name), x));
  ASSERT_NO_FATAL_FAILURE(expectSameHalf(codec("sym4", ",range=l2"), x, 1));
}

TEST_F(CudaTensorBucket, UnalignedElements) {
  for (size_t offset : {1, 2, 3})
    ASSERT_NO_FATAL_FAILURE(expectSame(codec("mid4"), normal(4999, 2), offset));
}

TEST_F(CudaTensorBucket, ZerosSubnormalsAndWideRanges) {
  for (const std::vector<float>& few : test::unusual()) {
    for (const char* name : {"minmax4", "qsgd2", "sym4", "sign1", "tern"})
      ASSERT_NO_FATAL_FAILURE(expectSame(codec(name), few)) << few[0];
    ASSERT_NO_FATAL_FAILURE(expectSame(codec("sym4", ",range=l2"), few)) << few[0];
  }
}

TEST_F(CudaTensorBucket, WhatIsNotFinite) {
  for (const char* name : {"minmax4", "qsgd3", "sym4", "sign1"}) {
    for (float bad : test::kBad) {
      std::vector<float> x = normal(3000, 5, 1, 4);  // few below 0: a mended one may be the least
      x[2345] = bad;
      EXPECT_EQ(refusals(codec(name), x), 1u) << name << " " << bad;
      for (const char* policy : {",nonfinite=saturate", ",nonfinite=poison"}) {
        ASSERT_NO_FATAL_FAILURE(expectSame(codec(name, policy), x)) << bad;
        ASSERT_NO_FATAL_FAILURE(expectSameHalf(codec(name, policy), x, 0)) << bad;
        ASSERT_NO_FATAL_FAILURE(expectSame(codec(name, policy), std::vector<float>(600, bad))) << bad;
      }
    }
  }
}

TEST_F(CudaTensorBucket, PayloadsThatAReaderRefuses) {
  for (const char* name : {"minmax3", "mid3", "sign1"})
    ASSERT_GT(refusedChanges(codec(name), normal(593, 1)), 10u) << name;
}

TEST_F(CudaTensorBucket, OnAStream) {
  ASSERT_NO_FATAL_FAILURE(expectSameOnAStream(codec("lattice4"), normal(100000, 1)));
}

TEST(CudaTensorBucketErrors, CallersMistakes) {
  using test::refusal;
  EXPECT_EQ(refusal<ValueError>("minmax4:bucket=tensor", (uint64_t{1} << 31) + 1),
            "decode uncut grid: elements: expected at most 2147483648, got 2147483649");
  EXPECT_EQ(refusal<ValueError>("minmax4", 64),
            "decode uncut grid: codec: expected axis=channel with C, or bucket=tensor, got minmax4:bucket=1024");
  EXPECT_EQ(refusal<ValueError>("levels4:bucket=tensor", 64),
            "decode uncut grid: codec: expected a grid codec other than levels and gauss, got levels4:bucket=tensor");
}

}  // namespace
}  // namespace lowcomm
