// One random number per bucket shifts the grid.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "codec/grid_laws.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using namespace test;

class Lattice : public test::EveryForm {};

INSTANTIATE_TEST_SUITE_P(Grid, Lattice, testing::ValuesIn(test::allForms()), test::formName);

// A bucket of 64 is 0, 3 and then the same value: at 2 bits a step of 1.
std::vector<float> buckets(size_t count, float value) {
  std::vector<float> x(64 * count, value);
  for (size_t i = 0; i < x.size(); i += 64) {
    x[i] = 0;
    x[i + 1] = 3;
  }
  return x;
}

// Mean and variance over the draws of 2^17 buckets: bias at most 2^-12 step, four standard deviations of sampling.
TEST_P(Lattice, UnbiasedWithTheStatedVariance) {
  const size_t count = 1 << 17;
  for (float value : {0.3f, 1.5f, 2.9f}) {
    const std::vector<float> x = buckets(count, value);
    const GridCodec c = codec("lattice2:bucket=64");
    const std::vector<float> y = decoded(c, encoded(c, x, {7, 8, 9}), x.size());
    double sum = 0, squares = 0;
    for (size_t i = 2; i < y.size(); i += 64) {
      const double error = double{y[i]} - value;
      sum += error;
      squares += error * error;
      ASSERT_EQ(y[i], y[i + 61]) << "one draw a bucket";
    }
    EXPECT_LE(std::fabs(sum / count), 0x1p-12 + 4 * std::sqrt(1.0 / 12 / count)) << value;
    EXPECT_NEAR(squares / count, 1.0 / 12, 0x1p-10 + 4 * 0.25 / std::sqrt(count)) << value;
  }
}

TEST_P(Lattice, DrawsDependOnSeedStreamStepAndBucket) {
  test::expectDrawsMatter(codec("lattice2:bucket=64"));
}

TEST_P(Lattice, BucketNumbersBeyond32Bits) {
  for (uint64_t bucket : {64, 256, 1024, 65536}) {
    const std::string text = "lattice4:bucket=" + std::to_string(bucket);
    const GridCodec c = codec(text), reference = test::gridCodec(text, *scalarKernels());
    const std::vector<float> x = normal(2 * c.granularity() + 100, 1);
    const uint64_t edge = bucket << 32;
    for (uint64_t first : {edge - c.granularity(), edge, edge + 3 * c.granularity()})
      EXPECT_EQ(encoded(c, x, {1, 2, 3}, first), encoded(reference, x, {1, 2, 3}, first)) << text;
    EXPECT_NE(encoded(c, x, {1, 2, 3}, edge), encoded(c, x, {1, 2, 3}));
  }
}

}  // namespace
}  // namespace lowcomm
