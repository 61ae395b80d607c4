// gauss and levels, under every kernel form: tables, codes, errors.
#include "kernels/codebook/codebook.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "base/narrow_float.h"
#include "codec/level_table.h"
#include "grid_cases.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using namespace test;

class ByBook : public test::EveryForm {
 protected:
  using EveryForm::codec;
  GridCodec codec(const std::string& text, const LevelTable& table) const {
    return GridCodec(CodecSpec::parse(text), *GetParam(), table);
  }
};

INSTANTIATE_TEST_SUITE_P(Forms, ByBook, testing::ValuesIn(test::allForms()), test::formName);

double density(double t) {
  return std::exp(-0.5 * t * t) / std::sqrt(2 * M_PI);
}
double above(double t) {
  return 0.5 * std::erfc(t / std::sqrt(2.0));
}

// The conditions of Lloyd and Max solved in double for the levels above 0: each is the mean of the normal distribution
// between its thresholds, which are halfway to its neighbours. Newton's method: each depends on its neighbours alone.
std::vector<double> lloydMax(int bits) {
  const size_t count = size_t{1} << (bits - 1);
  std::vector<double> y(count);
  // A normal distribution's best density of levels is that of one three times as wide; tanh is near enough to start.
  for (size_t i = 0; i < count; ++i)
    y[i] = 1.6 * std::atanh((static_cast<double>(i) + 0.5) / static_cast<double>(count));
  for (int round = 0; round < 200; ++round) {
    std::vector<double> below(count), own(count), next(count), off(count);
    for (size_t i = 0; i < count; ++i) {
      const bool last = i + 1 == count;
      const double a = i ? (y[i - 1] + y[i]) / 2 : 0, b = last ? 0 : (y[i] + y[i + 1]) / 2;
      const double at_a = density(a), at_b = last ? 0 : density(b), weight = above(a) - (last ? 0 : above(b));
      const double mean = (at_a - at_b) / weight;
      const double by_a = i ? at_a * (mean - a) / weight : 0, by_b = last ? 0 : at_b * (b - mean) / weight;
      off[i] = y[i] - mean;
      below[i] = -by_a / 2;
      next[i] = -by_b / 2;
      own[i] = 1 - (by_a + by_b) / 2;
    }
    for (size_t i = 1; i < count; ++i) {
      const double factor = below[i] / own[i - 1];
      own[i] -= factor * next[i - 1];
      off[i] -= factor * off[i - 1];
    }
    for (size_t i = count; i-- > 0;) {
      if (i + 1 < count) off[i] -= next[i] * off[i + 1];
      off[i] /= own[i];
    }
    double step = 1;  // halved until the levels stay in order
    const auto ordered = [&] {
      for (size_t i = 0; i < count; ++i) {
        if (y[i] - step * off[i] <= (i ? y[i - 1] - step * off[i - 1] : 0)) return false;
      }
      return true;
    };
    while (!ordered())
      step /= 2;
    double moved = 0;
    for (size_t i = 0; i < count; ++i) {
      y[i] -= step * off[i];
      moved = std::max(moved, std::fabs(off[i]));
    }
    if (moved < 1e-10) return y;
  }
  ADD_FAILURE() << "no solution for " << bits << " bits";
  return y;
}

TEST(Codebook, GaussLevelsAreThoseOfLloydAndMax) {
  for (int bits = 1; bits <= 8; ++bits) {
    const std::vector<double> expected = lloydMax(bits);
    for (size_t i = 0; i < expected.size(); ++i) {
      const float got = gaussCodebook(bits).level[expected.size() + i];
      // Rounded to the nearest float, except for what double cannot tell.
      const double half = (double{std::nextafter(got, INFINITY)} - got) / 2;
      ASSERT_NEAR(got, expected[i], half + 1e-9) << bits << " " << i;
    }
  }
}

TEST(Codebook, GaussThresholds) {
  EXPECT_EQ(gaussCodebook(2).threshold[2], 0.981598794f);
  for (int bits = 1; bits <= 8; ++bits) {
    const Codebook& book = gaussCodebook(bits);
    const int half = 1 << (bits - 1);
    EXPECT_EQ(book.threshold[half - 1], 0.0f);
    for (int i = 0; i < half - 1; ++i)
      EXPECT_EQ(book.threshold[i], -book.threshold[2 * half - 2 - i]);
  }
}

// Code e of a block.
uint32_t codeAt(const std::byte* words, int bits, size_t e) {
  const size_t bit = e / 16 * static_cast<size_t>(bits);
  const std::byte* lane = words + (bit / 32 * 16 + e % 16) * 4;
  uint32_t low, high = 0;
  std::memcpy(&low, lane, 4);
  if (bit % 32 + static_cast<size_t>(bits) > 32) std::memcpy(&high, lane + 64, 4);
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> bit % 32) & ((1u << bits) - 1);
}

// At every threshold and the floats next to it. The loops are asked themselves, with a scale that follows the largest
// magnitude, 16, instead of the rms: the quotients are then the elements.
TEST_P(ByBook, GaussCodesByTheDefinition) {
  GridForm form;
  form.bucket = 512;
  form.divisor = form.numerator = 16;
  for (int bits = 1; bits <= 8; ++bits) {
    const Codebook& book = gaussCodebook(bits);
    const int thresholds = (1 << bits) - 1;
    form.book = &book;
    std::vector<float> asked = {0.0f,    -0.0f,   0x1p-149f, -0x1p-149f, 1e-20f, -1e-20f,
                                0x1p-6f, 7.9375f, -7.9375f,  8,          -15};
    for (int i = 0; i < thresholds; ++i) {
      for (float toward : {book.threshold[i], INFINITY, -INFINITY})
        asked.push_back(std::nextafter(book.threshold[i], toward));
    }
    // The ends of cells, which vector forms look codes up by.
    for (float v = -6; v < 6; v += 0x1p-7f) {
      for (float toward : {v, INFINITY, -INFINITY})
        asked.push_back(std::nextafter(v, toward));
    }
    std::mt19937 generator(7);
    for (int i = 0; i < 5000; ++i)
      asked.push_back(static_cast<float>(generator()) * 0x1p-29f - 4);
    for (size_t from = 0; from < asked.size(); from += 511) {
      std::vector<float> x(asked.begin() + from, asked.begin() + std::min(asked.size(), from + 511));
      x.resize(512, 16);
      std::byte meta[4], words[512];
      ASSERT_TRUE(GetParam()->codebooks->encode[bits - 1][1](meta, words, x.data(), 512, form, 0, {}));
      for (size_t e = 0; e < 512; ++e) {
        const auto below =
            std::count_if(book.threshold, book.threshold + thresholds, [&](float t) { return t < x[e]; });
        ASSERT_EQ(codeAt(words, bits, e), below) << "gauss" << bits << " of " << x[e];
      }
    }
  }
}

TEST_P(ByBook, GaussErrsAsTheNormalDistributionSays) {
  const std::vector<float> x = normal(1 << 18, 3, 0.01f);
  const double expected[] = {.6028, .3428, .1858, .0975, .0500, .02536, .01275, .00642};
  for (int bits = 1; bits <= 8; ++bits) {
    const GridCodec c = codec("gauss" + std::to_string(bits));
    const std::vector<float> y = decoded(c, encoded(c, x), x.size());
    double difference = 0, norm = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      difference += (double{y[i]} - x[i]) * (double{y[i]} - x[i]);
      norm += double{x[i]} * x[i];
    }
    EXPECT_NEAR(std::sqrt(difference / norm), expected[bits - 1], expected[bits - 1] * 0.01) << bits;
  }
}

TEST_P(ByBook, GainMultipliesWhatIsDecoded) {
  const std::vector<float> x = normal(1500, 9);
  const GridCodec plain = codec("gauss3:meta=fp32"), gained = codec("gauss3:meta=fp32,gain=2");
  const Bytes payload = encoded(plain, x);
  EXPECT_EQ(payload, encoded(gained, x));
  const std::vector<float> y = decoded(plain, payload, x.size()), twice = decoded(gained, payload, x.size());
  for (size_t i = 0; i < x.size(); ++i)
    ASSERT_EQ(twice[i], 2 * y[i]) << i;
}

// Few levels far apart and many close together: cells with none and with all of them.
std::vector<float> crowdedLevels(int bits) {
  std::vector<float> values(size_t{1} << bits);
  for (size_t i = 0; i + 1 < values.size(); ++i)
    values[i] = static_cast<float>(i) * 0x1p-23f;
  values.back() = 1;
  return values;
}

std::vector<float> randomLevels(int bits, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<float> values(size_t{1} << bits);
  for (float& v : values)
    v = static_cast<float>(generator() >> 8) * 0x1p-24f;
  std::sort(values.begin(), values.end());  // the ends stay as they came: they are free
  return values;
}

// Against the definition: the number of thresholds below, element by element.
TEST_P(ByBook, LevelsByTheDefinition) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (const auto& values : {evenLevels(bits), randomLevels(bits, 3), crowdedLevels(bits)}) {
      const LevelTable table(values, 5);
      for (size_t bucket : {64, 512, 4096}) {
        const std::string text = "levels" + std::to_string(bits) + ":bucket=" + std::to_string(bucket);
        const GridCodec c = codec(text, table), reference(CodecSpec::parse(text), *scalarKernels(), table);
        EXPECT_EQ(c.stateVersion(), 5u);
        for (size_t n : test::edgeSizes(bucket)) {
          const std::vector<float> x = normal(n, static_cast<uint32_t>(n), 2, 1);
          const Bytes payload = encoded(c, x);
          const std::vector<float> y = decoded(c, payload, n);
          test::expectAsReference(c, reference, x, payload, y);
          if (HasFatalFailure()) return;
          for (size_t i = 0; i < n; ++i) {
            float scale[2];
            std::memcpy(scale, payload.data() + i / bucket * 8, 8);
            const float t = (x[i] - scale[0]) * (scale[1] > 0 ? 1 / scale[1] : 0);
            size_t code = 0;
            for (size_t k = 0; k + 1 < values.size(); ++k)
              code += (values[k] + values[k + 1]) * 0.5f < t;
            const float product = scale[1] * values[code];
            ASSERT_EQ(y[i], scale[0] + product) << text << " " << i << " of " << n;
          }
        }
      }
    }
  }
}

// Evenly spaced levels are minmax's grid: the same bound, half a step.
TEST_P(ByBook, EvenLevelsErrAsMinmax) {
  const std::vector<float> x = normal(5000, 8);
  for (const char* meta : {"", ",meta=bf16"}) {
    for (int bits = 1; bits <= 8; ++bits) {
      const GridCodec c = codec("levels" + std::to_string(bits) + ":bucket=128" + meta, LevelTable(evenLevels(bits)));
      const std::vector<float> y = decoded(c, encoded(c, x), x.size());
      for (size_t from = 0; from < x.size(); from += 128) {
        const auto [low, high] = std::minmax_element(x.begin() + from, x.begin() + std::min(x.size(), from + 128));
        const double step = (double{*high} - *low) * (*meta ? 1.02 : 1) / ((1 << bits) - 1);
        for (size_t i = from; i < std::min(x.size(), from + 128); ++i)
          ASSERT_LE(std::fabs(double{y[i]} - x[i]), 0.5002 * step + (*meta ? 0.04 : 1e-6)) << bits << meta << " " << i;
      }
    }
  }
}

TEST(LevelTables, RefusalsSayWhatAndWhy) {
  const auto made = [](std::vector<float> values) {
    return test::thrownBy([&] { LevelTable table(std::move(values)); });
  };
  EXPECT_EQ(made({0, 0.5f, 1}), "level table: expected 2, 4, 8, ... or 256 values, got 3");
  EXPECT_EQ(made({}), "level table: expected 2, 4, 8, ... or 256 values, got 0");
  EXPECT_NE(made({-0.25f, 1}).find("value 0: expected one in 0...1, got -0.25"), std::string::npos);
  EXPECT_NE(made({0, 2}).find("above 0 and at most 1, got 2"), std::string::npos);
  EXPECT_NE(made({0, 0.5f, 0.5f, 1}).find("value 2: expected one above 0.5"), std::string::npos);
  EXPECT_NE(made({0, 0.5f, NAN, 1}).find("value 2"), std::string::npos);
  EXPECT_EQ(made({-0.0f, 1}), test::kNothing);

  const auto codec = makeCodec(CodecSpec::parse("levels2"));
  const std::vector<float> x(10, 1.0f);
  EXPECT_EQ(test::thrownBy([&] { encoded(*codec, x); }), "levels2:bucket=1024: expected a level table, got none");
  EXPECT_EQ(test::thrownBy([&] { decoded(*codec, Bytes(128), 10); }),
            "levels2:bucket=1024: expected a level table, got none");
  EXPECT_EQ(test::thrownBy([&] { codec->with(LevelTable({0, 1})); }),
            "levels2:bucket=1024: level table: expected 4 values, got 2");
  EXPECT_EQ(test::thrownBy([&] { makeCodec(CodecSpec::parse("gauss4"))->with(LevelTable({0, 1})); }),
            "gauss4:bucket=512: expected no level table, got one");
  EXPECT_EQ(test::thrownBy([&] { makeCodec({})->with(LevelTable({0, 1})); }), "none: expected no level table, got one");
}

// A frame says with which table it was made; a reader with another refuses it by that field.
TEST(LevelTables, VersionsOfAFrameAreCompared) {
  const auto codec = makeCodec(CodecSpec::parse("levels2"));
  const auto older = codec->with(LevelTable({0, 0.25f, 0.5f, 1}, 2)),
             newer = codec->with(LevelTable({0, .3f, .6f, 1}, 3));
  EXPECT_EQ(codec->stateVersion(), 0u);
  FrameHeader header;
  header.codec = CodecId::levels;
  header.bits = 2;
  header.bucket = 1024;
  header.dtype = DType::float32;
  header.elements = 10;
  header.payload_bytes = static_cast<uint32_t>(older->encodedBytes(10, DType::float32));
  header.state_version = older->stateVersion();
  Bytes frame(kFrameHeaderBytes + header.payload_bytes);
  older->encode(std::span(frame).subspan(kFrameHeaderBytes), std::vector<float>(10, 1.0f).data(), DType::float32, 0, 10,
                {});
  sealFrame(frame, header);
  FrameHeader want = header;
  want.state_version = newer->stateVersion();
  EXPECT_EQ(test::thrownBy([&] { expectFrame(openFrame(frame), want); }), "frame: state_version: expected 3, got 2");
}

}  // namespace
}  // namespace lowcomm
