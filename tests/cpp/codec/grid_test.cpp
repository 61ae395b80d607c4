// The grid codecs, under every kernel form: draws and ranges. Their bounds are bounds_test.cpp's.
#include "codec/grid.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/narrow_float.h"
#include "codec/grid_laws.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using namespace test;

struct Scale {
  float base, step;
};

Scale scaleOf(const Bytes& payload, size_t bucket) {
  Scale scale;
  std::memcpy(&scale, payload.data() + 8 * bucket, 8);
  return scale;
}

class Grid : public test::EveryForm {};

INSTANTIATE_TEST_SUITE_P(Forms, Grid, testing::ValuesIn(test::allForms()), test::formName);

TEST_P(Grid, MeanOfStochasticRoundingIsTheValue) {
  // 10^6 draws of one value: bias at most 2^-9 step, and four standard deviations of the sampling error.
  const size_t n = 1000000;
  for (float value : {0.3f, 0.5f, 0.77f}) {
    std::vector<float> x(n, value);
    for (size_t i = 0; i < n; i += 1024) {
      x[i] = 0;
      x[std::min(i + 1, n - 1)] = 3;
    }
    const GridCodec c = codec("qsgd2:bucket=1024");
    const std::vector<float> y = decoded(c, encoded(c, x, {7, 8, 9}), n);
    double sum = 0, count = 0;
    for (size_t i = 0; i < n; ++i) {
      if (x[i] != value) continue;
      sum += y[i];
      ++count;
    }
    EXPECT_LE(std::fabs(sum / count - value), 0x1p-9 + 0x1p-16 + 4 * 0.5 / std::sqrt(count));
  }
}

TEST_P(Grid, DrawsDependOnSeedStreamStepAndPlace) {
  test::expectDrawsMatter(codec("qsgd2:bucket=64"));
}

TEST_P(Grid, OffsetsBeyondTheCountersLowWord) {
  const GridCodec c = codec("qsgd4:bucket=512"), reference = test::gridCodec("qsgd4:bucket=512", *scalarKernels());
  const std::vector<float> x = normal(2048 + 100, 1);
  const uint64_t edge = uint64_t{1} << 36;
  // The run spans the element at which counter word 1 becomes 1.
  const Bytes across = encoded(c, x, {1, 2, 3}, edge - 1024);
  EXPECT_EQ(across, encoded(reference, x, {1, 2, 3}, edge - 1024));
  EXPECT_EQ(encoded(c, x, {1, 2, 3}, edge), encoded(reference, x, {1, 2, 3}, edge));
  EXPECT_NE(encoded(c, x, {1, 2, 3}, edge), encoded(c, x, {1, 2, 3}, 0));
}

TEST_P(Grid, RangesWhoseInverseOverflows) {
  for (int bits : {1, 4, 8}) {
    const GridCodec c = codec("minmax" + std::to_string(bits) + ":bucket=64");
    const float top = static_cast<float>((1 << bits) - 1);
    for (float range : {0x1p-149f, 0x1p-140f, top * 0x1p-129f, top * 0x1p-128f, top * 0x1.000002p-128f, 0x1p-100f}) {
      std::vector<float> x(64, 0.0f);
      x[3] = range;
      const Bytes payload = encoded(c, x);
      EXPECT_EQ(scaleOf(payload, 0).step, range / top);
      const std::vector<float> y = decoded(c, payload, 64);
      const bool flat = std::isinf(top / range);
      EXPECT_EQ(y[3], flat ? 0.0f : range / top * top) << range;
      EXPECT_EQ(payload, encoded(reference(c), x));
    }
  }
}

TEST_P(Grid, TopCodeIsReachedForEveryRange) {
  const GridCodec c = codec("minmax8:bucket=64");
  std::vector<float> x(64 * 4096, 0.0f);
  std::mt19937 generator(3);
  for (size_t i = 0; i < x.size(); i += 64)
    x[i + 1] = floatOf(0x3f800000u | (generator() & 0x7fffffu));
  const Bytes payload = encoded(c, x);
  const std::vector<float> y = decoded(c, payload, x.size());
  for (size_t i = 0; i < x.size(); i += 64)
    ASSERT_EQ(y[i + 1], scaleOf(payload, i / 64).step * 255);
}

}  // namespace
}  // namespace lowcomm
