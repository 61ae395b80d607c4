#include "codec/level_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "codec/codec.h"
#include "codec/spec.h"
#include "kernels/finite.h"

namespace lowcomm {
namespace {

// Sums of four uniform numbers: nearly normal, and the same bits everywhere.
std::vector<float> nearlyNormal(size_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  const auto uniform = [&] { return static_cast<float>(generator() >> 8) * 0x1p-24f; };
  std::vector<float> x(count);
  for (float& value : x)
    value = (uniform() + uniform()) + (uniform() + uniform()) - 2.0f;
  return x;
}

double error(const std::string& codec, const LevelTable& table, const std::vector<float>& x) {
  const auto made = makeCodec(CodecSpec::parse(codec))->with(table);
  std::vector<std::byte> payload(made->encodedBytes(x.size(), DType::float32));
  std::vector<float> y(x.size());
  made->encode(payload, x.data(), DType::float32, 0, x.size(), {});
  made->decode(y.data(), DType::float32, payload, 0, x.size());
  double squares = 0;
  for (size_t i = 0; i < x.size(); ++i)
    squares += (y[i] - x[i]) * (y[i] - x[i]);
  return std::sqrt(squares);
}

LevelTable learned(int bits, uint32_t bucket, const std::vector<float>& x) {
  LevelLearning learning(LevelTable::even(bits), bucket);
  learning.see(x.data(), x.size());
  return learning.table(1);
}

TEST(LevelLearning, ErrsLessThanEvenLevelsOnOtherElementsOfTheSameKind) {
  const auto seen = nearlyNormal(1 << 17, 1), others = nearlyNormal(1 << 17, 2);
  for (const auto& [bits, most] : {std::pair(2, 0.75), {3, 0.85}, {4, 0.9}}) {
    const std::string codec = "levels" + std::to_string(bits) + ":bucket=1024";
    const double ratio = error(codec, learned(bits, 1024, seen), others) / error(codec, LevelTable::even(bits), others);
    EXPECT_LT(ratio, most) << codec;
    EXPECT_GT(ratio, 0.3) << codec;
  }
}

// The one-value rule of the paper, applied value by value with the levels of the batch's start, is what a batch of one
// value a level does; n values of one level are n such moves towards their mean.
TEST(LevelLearning, ABatchIsThePapersRuleTowardsTheMean) {
  std::vector<float> x(64, 0.0f);
  x[1] = 1;
  x[2] = 0.3f;
  x[3] = 0.36f;
  const LevelTable table = learned(2, 64, x);
  const auto towards = [](double q, double mean, int n) {
    for (int k = 0; k < n; ++k)
      q -= LevelLearning::kRate * (q - mean);
    return q;
  };
  EXPECT_EQ(table.values()[0], 0);
  EXPECT_NEAR(table.values()[1], towards(1.0f / 3, 0.33, 2), 1e-7);
  EXPECT_EQ(table.values()[2], 2.0f / 3);
  EXPECT_EQ(table.values()[3], 1);
}

TEST(LevelLearning, BucketsCountFromARunsStartAndRunsAreSeenInTurn) {
  const auto x = nearlyNormal(5000, 3);
  LevelLearning one(LevelTable::even(3), 64), two(LevelTable::even(3), 64);
  one.see(x.data(), 2048);
  one.see(x.data() + 2048, 2952);
  two.see(x.data(), 2048);
  EXPECT_NE(one.table(0), two.table(0));
  two.see(x.data() + 2048, 2952);
  EXPECT_EQ(one.table(0), two.table(0));
  EXPECT_EQ(one.seen(), 5000u);
  // 2048 elements are two batches: cut there, a run is the same as two.
  EXPECT_EQ(one.table(1), learned(3, 64, x));
}

TEST(LevelLearning, PassesOverWhatTeachesNothing) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {NAN, infinity, -infinity, kFiniteLimit}) {
    auto x = nearlyNormal(128, 4);
    LevelLearning clean(LevelTable::even(3), 64);
    clean.see(x.data() + 64, 64);
    for (const size_t at : {0, 5, 63}) {
      auto spoilt = x;
      spoilt[at] = bad;
      LevelLearning learning(LevelTable::even(3), 64);
      learning.see(spoilt.data(), spoilt.size());
      EXPECT_EQ(learning.seen(), 64u) << bad;
      EXPECT_EQ(learning.table(0), clean.table(0)) << bad;
    }
  }
  LevelLearning learning(LevelTable::even(4), kTensorBucket);
  learning.see(nullptr, 0);
  const std::vector<float> flat(3000, 0.25f), subnormal = {0, 1e-42f, 3e-42f};
  learning.see(flat.data(), flat.size());
  learning.see(subnormal.data(), subnormal.size());
  EXPECT_EQ(learning.seen(), 0u);
  EXPECT_EQ(learning.table(0), LevelTable::even(4));
}

TEST(LevelLearning, EveryBitWidthAndBucketStaysATable) {
  const auto x = nearlyNormal(10000, 5);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const uint32_t bucket : {64u, 1024u, 65536u, kTensorBucket}) {
      LevelLearning learning(LevelTable::even(bits), bucket);
      for (int round = 0; round < 3; ++round)
        learning.see(x.data(), x.size());
      EXPECT_EQ(learning.table(7).version(), 7u);  // throws where the levels are none
      EXPECT_EQ(learning.seen(), 30000u);
    }
  }
  // Two values only: the levels between stay where they are, and none meets another.
  std::vector<float> two(4096);
  for (size_t i = 0; i < two.size(); ++i)
    two[i] = i % 2 ? 1.0f : 0.999f;
  learned(8, 1024, two);
  EXPECT_THROW(LevelLearning(LevelTable::even(3), 100), ValueError);
}

// Golden: the same bits on every machine and with every compiler.
TEST(LevelLearning, Bits) {
  EXPECT_EQ(learned(3, 256, nearlyNormal(20000, 6)).str(),
            "1:0.08281273,0.23077953,0.33724567,0.4391598,0.545616,0.6500686,0.774271,0.9269844");
}

TEST(LevelTables, MeanOfRanks) {
  const LevelTable a({0, 0.25f, 0.5f, 1}, 1), b({0.125f, 0.5f, 0.75f, 1}, 1), even = LevelTable::even(2);
  const std::vector<LevelTable> both = {a, b};
  EXPECT_EQ(meanOf(both, std::vector<uint64_t>{1, 1}, even, 2), LevelTable({0.0625f, 0.375f, 0.625f, 1}, 2));
  EXPECT_EQ(meanOf(both, std::vector<uint64_t>{3, 1}, even, 2), LevelTable({0.03125f, 0.3125f, 0.5625f, 1}, 2));
  EXPECT_EQ(meanOf(both, std::vector<uint64_t>{0, 0}, a, 2), LevelTable({0, 0.25f, 0.5f, 1}, 2));
  EXPECT_THROW(meanOf(both, std::vector<uint64_t>{1}, even, 2), ValueError);
  EXPECT_THROW(meanOf(both, std::vector<uint64_t>{1, 1}, LevelTable::even(3), 2), ValueError);
}

TEST(LevelTables, TextIsTheTable) {
  for (int bits = 1; bits <= 8; ++bits) {
    const LevelTable table = learned(bits, 128, nearlyNormal(3000, bits));
    EXPECT_EQ(LevelTable::parse(table.str()), table);
  }
  EXPECT_EQ(LevelTable({0, 0.25f, 0.5f, 1}, 3).str(), "3:0,0.25,0.5,1");
  for (const char* text :
       {"", "3", ":0,1", "3:", "3:0", "3:0,", "3:,1", "x:0,1", "-1:0,1", "3:0,1,", "3: 0,1", "3:0 1", "3:0,nan"})
    EXPECT_THROW(LevelTable::parse(text), ValueError) << text;
}

}  // namespace
}  // namespace lowcomm
