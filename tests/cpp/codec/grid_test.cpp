// The laws of the grid codecs, under every kernel form.
#include "codec/grid.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/narrow_float.h"
#include "codec/grid_laws.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::decoded;
using test::encoded;
using test::normal;

struct Scale {
  float base, step;
};

Scale scaleOf(const Bytes& payload, size_t bucket) {
  Scale scale;
  std::memcpy(&scale, payload.data() + 8 * bucket, 8);
  return scale;
}

float ulpOf(float magnitude) {
  return std::nextafter(magnitude, INFINITY) - magnitude;
}

// |error| <= 0.5002 step + ulp for minmax (2 ulp for lattice), < step + ulp for qsgd, per element.
void expectBound(const GridCodec& codec, const std::vector<float>& x, const Bytes& payload,
                 const std::vector<float>& y) {
  const size_t bucket = codec.spec().bucket;
  const CodecId id = codec.spec().id;
  const double factor = id == CodecId::minmax || id == CodecId::lattice ? 0.5002 : 1.0;
  for (size_t from = 0; from < x.size(); from += bucket) {
    const size_t to = std::min(x.size(), from + bucket);
    float largest = 0;
    for (size_t i = from; i < to; ++i)
      largest = std::max(largest, std::fabs(x[i]));
    const double bound =
        factor * scaleOf(payload, from / bucket).step + (id == CodecId::lattice ? 2 : 1) * ulpOf(largest);
    for (size_t i = from; i < to; ++i) {
      ASSERT_LE(std::fabs(double{y[i]} - x[i]), bound) << codec.spec().str() << " element " << i << " of " << x.size();
    }
  }
}

class EveryForm : public testing::TestWithParam<const KernelTable*> {
 protected:
  GridCodec codec(const std::string& text) const { return test::gridCodec(text, *GetParam()); }
  GridCodec codec(const char* family, int bits, size_t bucket) const {
    return codec(family + std::to_string(bits) + ":bucket=" + std::to_string(bucket));
  }
};

INSTANTIATE_TEST_SUITE_P(Grid, EveryForm, testing::ValuesIn(test::allForms()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST_P(EveryForm, RoundTripWithinBoundAndEqualToReference) {
  for (size_t bucket : {64, 128, 256, 512, 1024, 4096, 65536}) {
    for (size_t n : test::edgeSizes(bucket)) {
      const std::vector<float> x = normal(n, static_cast<uint32_t>(n), 3, 0.5f);
      for (const char* family : {"minmax", "qsgd", "lattice"}) {
        for (int bits = 1; bits <= 8; ++bits) {
          if (bucket == 65536 && bits != 4 && bits != 7) continue;  // the loops are those of 4096
          const GridCodec c = codec(family, bits, bucket);
          const Draws draws{11, 22, 33};
          const Bytes payload = encoded(c, x, draws);
          const std::vector<float> y = decoded(c, payload, n);
          expectBound(c, x, payload, y);
          test::expectAsReference(c, test::gridCodec(c.spec().str(), *scalarKernels()), x, payload, y, draws);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(EveryForm, HalfInputIsConvertedFirst) {
  for (const char* text :
       {"minmax8:bucket=1024", "qsgd4:bucket=64", "minmax3:bucket=65536", "qsgd5:bucket=4096", "lattice4:bucket=64"}) {
    const GridCodec c = codec(text);
    for (size_t n : {0, 1, 513, 2048, 5000, 70001, 140000}) {
      std::vector<float> x = normal(n, 5);
      std::vector<uint16_t> half(n), brain(n), back(n);
      for (size_t i = 0; i < n; ++i) {
        half[i] = floatToFloat16(x[i]);
        brain[i] = floatToBfloat16(x[i]);
      }
      const Draws draws{1, 2, 3};
      for (bool is_half : {true, false}) {
        const auto& narrow = is_half ? half : brain;
        const DType dtype = is_half ? DType::float16 : DType::bfloat16;
        for (size_t i = 0; i < n; ++i)
          x[i] = is_half ? float16ToFloat(half[i]) : bfloat16ToFloat(brain[i]);
        const Bytes payload = encoded(c, narrow, draws, 0, dtype);
        ASSERT_EQ(payload, encoded(c, x, draws)) << text << " " << n;
        const std::vector<float> y = decoded(c, payload, n);
        c.decode(back.data(), dtype, payload, 0, n);
        for (size_t i = 0; i < n; ++i) {
          ASSERT_EQ(back[i], is_half ? floatToFloat16(y[i]) : floatToBfloat16(y[i])) << text << " " << i;
        }
      }
    }
  }
}

TEST_P(EveryForm, MeanOfStochasticRoundingIsTheValue) {
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

TEST_P(EveryForm, DrawsDependOnSeedStreamStepAndPlace) {
  test::expectDrawsMatter(codec("qsgd2:bucket=64"));
}

TEST_P(EveryForm, OffsetsBeyondTheCountersLowWord) {
  const GridCodec c = codec("qsgd4:bucket=512"), reference = test::gridCodec("qsgd4:bucket=512", *scalarKernels());
  const std::vector<float> x = normal(2048 + 100, 1);
  const uint64_t edge = uint64_t{1} << 36;
  // The run spans the element at which counter word 1 becomes 1.
  const Bytes across = encoded(c, x, {1, 2, 3}, edge - 1024);
  EXPECT_EQ(across, encoded(reference, x, {1, 2, 3}, edge - 1024));
  EXPECT_EQ(encoded(c, x, {1, 2, 3}, edge), encoded(reference, x, {1, 2, 3}, edge));
  EXPECT_NE(encoded(c, x, {1, 2, 3}, edge), encoded(c, x, {1, 2, 3}, 0));
}

TEST_P(EveryForm, CuttingChangesNothing) {
  for (const char* text :
       {"qsgd4:bucket=64", "qsgd3:bucket=1024", "minmax8:bucket=4096", "minmax1:bucket=512", "lattice3:bucket=2048"}) {
    const GridCodec c = codec(text);
    const uint64_t granule = c.granularity(), n = 5 * granule + 333;
    const std::vector<float> x = normal(n, 2);
    const std::vector<float> whole = decoded(c, encoded(c, x, {4, 5, 6}), n);
    std::vector<float> pieces;
    for (uint64_t first = 0; first < n; first += 2 * granule) {
      const std::vector<float> piece(x.begin() + first, x.begin() + std::min(n, first + 2 * granule));
      const std::vector<float> y = decoded(c, encoded(c, piece, {4, 5, 6}, first), piece.size(), first);
      pieces.insert(pieces.end(), y.begin(), y.end());
    }
    EXPECT_EQ(whole, pieces) << text;
  }
}

TEST_P(EveryForm, DifficultRanges) {
  for (const char* family : {"minmax", "qsgd", "lattice"}) {
    for (int bits : {1, 4, 8}) {
      const GridCodec c = codec(family, bits, 64);
      const auto check = [&](const std::vector<float>& x) {
        const Bytes payload = encoded(c, x, {1, 2, 3});
        expectBound(c, x, payload, decoded(c, payload, x.size()));
        EXPECT_EQ(payload, encoded(test::gridCodec(c.spec().str(), *scalarKernels()), x, {1, 2, 3}));
      };
      EXPECT_EQ(decoded(c, encoded(c, std::vector<float>(100, 3.25f)), 100), std::vector<float>(100, 3.25f));
      check(normal(500, 1, 1, 1e8f));
      check(normal(500, 1, 1, -1000.0f));
      check(normal(500, 1, 1e-30f));
      check(normal(500, 1, 0x1p120f));
      check({-0x1.fffffep125f, 0x1.fffffep125f, 0, 1});

      // All zeros of either sign: one payload, and +0 comes back.
      const std::vector<float> zeros(70, 0.0f), minus(70, -0.0f);
      EXPECT_EQ(encoded(c, zeros), encoded(c, minus));
      for (float v : decoded(c, encoded(c, minus), 70))
        EXPECT_EQ(floatBits(v), 0u);
    }
  }
}

TEST_P(EveryForm, RangesWhoseInverseOverflows) {
  for (int bits : {1, 4, 8}) {
    const GridCodec c = codec("minmax", bits, 64);
    const float top = static_cast<float>((1 << bits) - 1);
    for (float range : {0x1p-149f, 0x1p-140f, top * 0x1p-129f, top * 0x1p-128f, top * 0x1.000002p-128f, 0x1p-100f}) {
      std::vector<float> x(64, 0.0f);
      x[3] = range;
      const Bytes payload = encoded(c, x);
      EXPECT_EQ(scaleOf(payload, 0).step, range / top);
      const std::vector<float> y = decoded(c, payload, 64);
      const bool flat = std::isinf(top / range);
      EXPECT_EQ(y[3], flat ? 0.0f : range / top * top) << range;
      EXPECT_EQ(payload, encoded(test::gridCodec(c.spec().str(), *scalarKernels()), x));
    }
  }
}

TEST_P(EveryForm, TopCodeIsReachedForEveryRange) {
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

TEST_P(EveryForm, NonFiniteIsRefusedWithItsPosition) {
  const float bad[] = {NAN, -NAN, INFINITY, -INFINITY, 0x1p126f, -0x1p126f, 3e38f};
  for (const char* text : {"minmax8:bucket=64", "qsgd4:bucket=1024", "minmax1:bucket=4096", "lattice3:bucket=128"}) {
    const GridCodec c = codec(text);
    for (size_t n : {1, 17, 513, 4097, 5000}) {
      for (size_t at : {size_t{0}, size_t{1}, size_t{15}, size_t{16}, size_t{63}, size_t{64}, size_t{511}, size_t{512},
                        size_t{1024}, size_t{4095}, size_t{4096}, n - 1}) {
        if (at >= n) continue;
        for (float value : bad) {
          std::vector<float> x = normal(n, 1);
          x[at] = value;
          x[n - 1] = value;
          try {
            encoded(c, x, {}, 8192);
            ADD_FAILURE() << text << " took " << value << " at " << at << " of " << n;
          } catch (const NonFiniteError& error) {
            ASSERT_EQ(error.position, 8192 + at);
            ASSERT_NE(std::string(error.what()).find("element " + std::to_string(8192 + at)), std::string::npos);
          }
        }
      }
    }
    std::vector<uint16_t> half(3000, 0x3c00);
    half[2500] = 0x7c00;
    try {
      encoded(c, half, {}, 0, DType::float16);
      ADD_FAILURE() << text;
    } catch (const NonFiniteError& error) {
      EXPECT_EQ(error.position, 2500u);
    }
  }
}

TEST_P(EveryForm, CallersMistakes) {
  const GridCodec c = codec("minmax4:bucket=1024");
  std::vector<float> x(10);
  Bytes payload(c.encodedBytes(10, DType::float32));
  EXPECT_EQ(payload.size(), 128u);
  EXPECT_EQ(c.encodedBytes(1537, DType::float32), 896u);
  EXPECT_THROW(c.encode(std::span(payload).first(64), x.data(), DType::float32, 0, 10, {}), ValueError);
  EXPECT_THROW(c.encode(payload, x.data(), DType::float32, 512, 10, {}), ValueError);
  for (DType dtype : {DType::float64, DType::int32, DType::opaque, DType::boolean}) {
    try {
      c.encode(payload, x.data(), dtype, 0, 10, {});
      ADD_FAILURE();
    } catch (const TypeError& error) {
      EXPECT_NE(std::string(error.what()).find(dtypeName(dtype)), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("float32"), std::string::npos);
    }
  }
}

TEST_P(EveryForm, PayloadsThatAreNone) {
  // Every bit that carries nothing is refused when set; every other one is taken.
  for (const char* text : {"minmax3:bucket=64", "qsgd8:bucket=64", "minmax1:bucket=1024", "minmax5:bucket=256"}) {
    const GridCodec c = codec(text);
    for (size_t n : {1, 18, 530, 600}) {
      const Bytes good = encoded(c, normal(n, 1));
      test::expectIdleBitsAreRefused(c, good, n, 8, n * c.spec().bits);
      std::vector<float> y(n);
      EXPECT_THROW(c.decode(y.data(), DType::float32, std::span(good).first(good.size() - 1), 0, n), WireError);
    }
  }
}

}  // namespace
}  // namespace lowcomm
