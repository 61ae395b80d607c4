// axis=channel on CUDA against the scalar codec: the same bytes, values and refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cuda/uncut_cases.h"

namespace lowcomm {
namespace {

using test::Bytes;
using test::Uncut;

class CudaChannel : public test::CudaUncut {
 protected:
  static Uncut codec(const std::string& name, size_t channels, const std::string& options = "") {
    return Uncut(name + ":axis=channel,C=" + std::to_string(channels) + options);
  }
};

// Channels of very different sizes, as activations have them.
std::vector<float> activations(size_t rows, size_t channels, uint32_t seed = 1) {
  std::vector<float> x = test::normal(rows * channels, seed);
  for (size_t e = 0; e < x.size(); ++e)
    x[e] = x[e] * std::ldexp(1.0f, static_cast<int>(e % channels % 9) - 4) + static_cast<float>(e % channels % 3);
  return x;
}

// Numbers of channels with every way of standing to rows of 16, to the four of a load, and to columns and their tiles;
// numbers of rows around the 64 partial sums.
TEST_F(CudaChannel, EveryNumberOfChannelsEqualsScalar) {
  size_t turn = 0;
  const char* names[] = {"minmax4", "qsgd3", "dither5", "lattice4", "sym4", "mid3", "tern"};
  for (size_t channels : {1, 2, 3, 5, 15, 16, 17, 48, 100, 511, 513, 1024, 1030, 3001}) {
    for (size_t rows : {1, 2, 31, 64, 65, 130}) {
      if (channels * rows > 40000) continue;
      ASSERT_NO_FATAL_FAILURE(expectSame(codec(names[turn++ % 7], channels), activations(rows, channels)));
    }
  }
  for (size_t channels : {1, 2, 3, 7, 8, 9, 17, 250}) {
    for (size_t rows : {1, 2, 63, 64, 65, 130}) {
      const bool sign = turn++ % 2 == 0;
      ASSERT_NO_FATAL_FAILURE(
          expectSame(codec(sign ? "sign1" : "sym5", channels, sign ? "" : ",range=l2"), activations(rows, channels)));
    }
  }
}

TEST_F(CudaChannel, EveryTextEqualsScalar) {
  size_t turn = 0;
  for (const std::string& name : test::uncutTexts()) {
    const size_t channels[] = {3, 24, 40, 1};
    const size_t at = turn++ % 4;
    const size_t colon = name.find(':');
    const std::string options = colon == std::string::npos ? "" : "," + name.substr(colon + 1);
    ASSERT_NO_FATAL_FAILURE(
        expectSame(codec(name.substr(0, colon), channels[at], options), activations(at == 2 ? 27 : 77, channels[at])));
  }
}

// Chains of sums that are longer than a thread reads ahead.
TEST_F(CudaChannel, LongChannels) {
  for (size_t channels : {1, 7, 9}) {
    const std::vector<float> x = activations(5000, channels);
    for (const char* name : {"sign1", "lattice3"})
      ASSERT_NO_FATAL_FAILURE(expectSame(codec(name, channels), x));
    ASSERT_NO_FATAL_FAILURE(expectSame(codec("mid4", channels, ",range=l2,meta=bf16"), x));
  }
}

// More blocks than a launch holds at once, from one to the next of which the channels shift.
TEST_F(CudaChannel, MoreThanALaunchHoldsAtOnce) {
  ASSERT_NO_FATAL_FAILURE(expectSame(codec("lattice4", 1001), activations(140, 1001)));
}

TEST_F(CudaChannel, AsManyChannelsAsThereMayBe) {
  const std::vector<float> x = activations(1, 65536);
  ASSERT_NO_FATAL_FAILURE(expectSame(codec("qsgd4", 65536, ",meta=bf16"), x));
}

TEST_F(CudaChannel, UnalignedAndSixteenBitElements) {
  for (size_t channels : {6, 64}) {
    const std::vector<float> x = activations(90, channels);
    for (size_t offset : {1, 2, 3})
      ASSERT_NO_FATAL_FAILURE(expectSame(codec("minmax4", channels), x, offset));
    for (const char* name : {"qsgd4", "lattice7", "sym8", "sign1", "tern"}) {
      for (size_t offset : {0, 1})
        ASSERT_NO_FATAL_FAILURE(expectSameHalf(codec(name, channels), x, offset));
    }
  }
}

TEST_F(CudaChannel, ZerosSubnormalsAndWideRanges) {
  for (const std::vector<float>& few : test::unusual()) {
    std::vector<float> x(700);
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = few[i % few.size()];
    for (const char* name : {"minmax4", "lattice4", "sym4", "sign1", "tern"})
      ASSERT_NO_FATAL_FAILURE(expectSame(codec(name, 10), x)) << few[0];
    ASSERT_NO_FATAL_FAILURE(expectSame(codec("mid4", 10, ",range=l2,meta=bf16"), x)) << few[0];
  }
}

// A channel without a finite element, ones with one of each kind, ones without.
TEST_F(CudaChannel, WhatIsNotFinite) {
  const size_t channels = 24, rows = 70;
  const std::vector<float> good = activations(rows, channels, 2);
  for (const auto& [name, range] : {std::pair<std::string, std::string>{"minmax4", ""},
                                    {"qsgd3", ",meta=bf16"},
                                    {"lattice4", ""},
                                    {"sym4", ""},
                                    {"sym5", ",range=l2"},
                                    {"sign1", ""},
                                    {"tern", ",meta=bf16"}}) {
    for (float bad : test::kBad) {
      std::vector<float> x = good;
      x[777] = bad;
      EXPECT_EQ(refusals(codec(name, channels, range), x), 1u) << name << " " << bad;
    }
    std::vector<float> x = good;
    for (size_t i = 0; i < std::size(test::kBad); ++i)
      x[channels * (10 * i + 3) + 3 * i] = test::kBad[i];
    for (size_t t = 0; t < rows; ++t)
      x[t * channels + 23] = t % 2 ? test::kBad[2] : test::kBad[0];
    for (const char* policy : {",nonfinite=saturate", ",nonfinite=poison"}) {
      const Uncut c = codec(name, channels, range + policy);
      ASSERT_NO_FATAL_FAILURE(expectSame(c, x));
      ASSERT_NO_FATAL_FAILURE(expectSameHalf(c, x, 0));
      ASSERT_NO_FATAL_FAILURE(expectSame(c, good));
    }
  }
}

TEST_F(CudaChannel, ARangeAboveWhatDeltaSpansIsRefused) {
  std::vector<float> x(64, 0.0f);
  x[5] = 15;
  EXPECT_EQ(refusals(codec("qsgd4", 16, ",delta=1"), x), 0u);
  EXPECT_EQ(refusals(codec("qsgd4", 16, ",delta=0.9,nonfinite=saturate"), x), 1u);
}

TEST_F(CudaChannel, PayloadsThatAReaderRefuses) {
  const size_t channels = 10, rows = 55;
  for (const char* name : {"minmax3", "sym3", "tern"}) {
    ASSERT_GT(refusedChanges(codec(name, channels), activations(rows, channels)), 20u) << name;
    ASSERT_GT(refusedChanges(codec(name, channels, ",meta=bf16"), activations(rows, channels)), 10u) << name;
  }
}

TEST_F(CudaChannel, PoisonIsRefusedUnderOtherPolicies) {
  std::vector<float> x = activations(20, 8);
  x[70] = NAN;
  for (const char* name : {"minmax4", "sym4"}) {
    const Bytes poisoned = test::encoded(*codec(name, 8, ",nonfinite=poison").codec, x);
    uint32_t refused = 0;
    decodedThere<float>(codec(name, 8), poisoned, x.size(), DType::float32, refused);
    EXPECT_EQ(refused, 1u) << name;
  }
}

TEST_F(CudaChannel, OnAStream) {
  ASSERT_NO_FATAL_FAILURE(expectSameOnAStream(codec("mid4", 320, ",range=l2"), activations(200, 320)));
}

TEST(CudaChannelErrors, CallersMistakes) {
  using test::refusal;
  EXPECT_EQ(refusal<ValueError>("sym4:axis=channel,C=16", 17),
            "decode uncut grid: elements: expected a multiple of 16, got 17");
  EXPECT_EQ(refusal<ValueError>("sym4:axis=channel", 16),
            "decode uncut grid: codec: expected axis=channel with C, or bucket=tensor, got sym4:axis=channel");
  EXPECT_EQ(refusal<ValueError>("sym4:axis=channel,C=16", 16, DType::float32, 8),
            "decode uncut grid: payload: expected an address that is a multiple of 16, got 8 more");
  EXPECT_EQ(refusal<ValueError>("sym4:axis=channel,C=16", 16, DType::float32, 0, 4),
            "decode uncut grid: workspace: expected an address that is a multiple of 16, got 4 more");
  EXPECT_EQ(refusal<TypeError>("sym4:axis=channel,C=16", 16, DType::int8),
            "decode uncut grid: elements: expected float32, float16 or bfloat16, got int8");
  EXPECT_EQ(refusal<std::exception>("sym4:axis=channel,C=16", 0), "no error");
}

}  // namespace
}  // namespace lowcomm
