// unit=<U> (FORMAT.md, "Units"): under every kernel form the same bytes, and no unit that tells of another.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "codec/grid_laws.h"
#include "codec/nonfinite.h"
#include "grid_cases.h"

namespace lowcomm {
namespace {

using namespace test;

const Draws kDraws{7, 3, 2};

class UnitCodecs : public test::EveryForm {};

INSTANTIATE_TEST_SUITE_P(Units, UnitCodecs, testing::ValuesIn(test::allForms()), test::formName);

TEST_P(UnitCodecs, NoUnitTellsOfAnother) {
  constexpr size_t kCount = 9, kOther = 4;
  for (const std::string& text : kUnitTexts) {
    for (uint64_t unit : kUnitSizes) {
      const auto codec = codecOf(withUnit(text, unit), *GetParam());
      std::vector<float> x = normal(unit * kCount, 5);
      const std::vector<float> before = decoded(*codec, encoded(*codec, x, kDraws), x.size());
      const std::vector<float> others = normal(unit, 6, 100);
      std::copy(others.begin(), others.end(), x.begin() + static_cast<ptrdiff_t>(kOther * unit));
      const std::vector<float> after = decoded(*codec, encoded(*codec, x, kDraws), x.size());
      for (size_t i = 0; i < x.size(); ++i) {
        if (i / unit != kOther) ASSERT_EQ(before[i], after[i]) << codec->spec().str() << ", element " << i;
      }
    }
  }
}

// Without a unit the very same test fails, or it would show nothing.
TEST_P(UnitCodecs, ElementsWithoutUnitsTellOfOthers) {
  const auto codec = codecOf("gauss4", *GetParam());
  std::vector<float> x = normal(576 * 2, 5);
  const std::vector<float> before = decoded(*codec, encoded(*codec, x), x.size());
  std::fill(x.begin() + 576, x.end(), 50.0f);
  const std::vector<float> after = decoded(*codec, encoded(*codec, x), x.size());
  EXPECT_FALSE(std::equal(before.begin(), before.begin() + 576, after.begin()));
}

// By the definition: parts are tensors, of which those without a rotation have a codec of their own, too.
TEST_P(UnitCodecs, PartsAreTensors) {
  for (const std::string name : {"minmax4", "sym3", "qsgd5", "lattice4"}) {
    constexpr size_t kUnit = 2 * 256 + 128 + 64 - 5, kCount = 11;
    const std::vector<float> x = normal(kUnit * kCount, 8);
    const auto codec = codecOf(name + ":bucket=256,unit=" + std::to_string(kUnit), *GetParam());
    const Bytes payload = encoded(*codec, x, kDraws);
    size_t at = 0, number = 0, from = 0;
    for (size_t size : {512, 128, 64}) {
      std::vector<float> part;
      for (size_t i = 0; i < kCount; ++i) {
        for (size_t e = from; e < from + size; ++e)
          part.push_back(x[i * kUnit + std::min(e, kUnit - 1)]);
      }
      const auto own = codecOf(name + ":bucket=" + std::to_string(std::min<size_t>(size, 256)), *GetParam());
      const Bytes expected = encoded(*own, part, kDraws, static_cast<uint64_t>(number++) << 40);
      ASSERT_LE(at + expected.size(), payload.size());
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), payload.begin() + static_cast<ptrdiff_t>(at))) << size;
      at += expected.size();
      from += size;
    }
    EXPECT_EQ(at, payload.size());
  }
}

// The relative error stays that of the flat codec: buckets are shorter, rotations too.
TEST_P(UnitCodecs, LoseNoMoreThanTheFlatCodec) {
  for (const std::string& text : kUnitTexts) {
    for (uint64_t unit : {576, 896, 1600}) {
      const std::vector<float> x = normal(unit * 64, 4);
      const auto lossOf = [&](const Codec& codec) {
        const std::vector<float> y = decoded(codec, encoded(codec, x, kDraws), x.size());
        double lost = 0;
        for (size_t i = 0; i < x.size(); ++i)
          lost += (y[i] - x[i]) * (y[i] - x[i]);
        return lost;
      };
      EXPECT_LT(lossOf(*codecOf(withUnit(text, unit), *GetParam())), 1.03 * lossOf(*codecOf(text, *GetParam())))
          << text << ", " << unit;
    }
  }
}

TEST_P(UnitCodecs, ElementsThatAreNotFinite) {
  std::vector<float> x = normal(300 * 4, 2);
  x[300 + 290] = NAN;  // in the second part of unit 1
  const auto codec = codecOf("minmax4:bucket=256,unit=300", *GetParam());
  EXPECT_EQ(test::refusedElement([&] { encoded(*codec, x); }), 590u);
  const auto poisoning = codecOf("gauss4:nonfinite=poison,unit=300", *GetParam());
  const std::vector<float> poisoned = decoded(*poisoning, encoded(*poisoning, x), x.size());
  for (size_t i = 0; i < x.size(); ++i)
    EXPECT_EQ(std::isnan(poisoned[i]), i >= 300 + 256 + 32 && i < 600) << i;  // 300 is filled to 304 = 256 + 32 + 16
}

TEST(Units, WhereBucketsEndWithThemTheyMakeNoDifference) {
  EXPECT_EQ(CodecSpec::parse("sym4:bucket=512,unit=1024").str(), "sym4:bucket=512");
  EXPECT_EQ(CodecSpec::parse("minmax4:bucket=64,unit=576").str(), "minmax4:bucket=64");
  EXPECT_EQ(CodecSpec::parse("gauss4:unit=576").str(), "gauss4:bucket=512,unit=576");
  EXPECT_EQ(CodecSpec::parse("gauss4:unit=1024").str(), "gauss4:bucket=512,unit=1024") << "blocks turn";
  EXPECT_EQ(CodecSpec::parse("bf16").withUnit(576).str(), "bf16");
  EXPECT_EQ(CodecSpec{}.withUnit(576).str(), "none");
}

// What a model learns to send along: a direction that all tokens share, and that is one element of a block as rotated
// without turns. gauss clips it then in all of them; of units in few.
TEST_P(UnitCodecs, NoDirectionIsClippedInAllUnits) {
  constexpr size_t kUnit = 512, kCount = 64;
  std::vector<float> element(kUnit), direction(kUnit), x = normal(kUnit * kCount, 3);
  element[100] = 1;
  scalar::kRotation.unrotate[kAllRows][0](direction.data(), element.data(), kUnit, {});
  for (size_t i = 0; i < x.size(); ++i)
    x[i] += 20 * direction[i % kUnit];
  for (const char* name : {"gauss2", "gauss4"}) {
    const auto along = [&](const std::string& text) {
      const auto codec = codecOf(text, *GetParam());
      const std::vector<float> y = decoded(*codec, encoded(*codec, x, kDraws), x.size());
      double sum = 0, of_x = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        sum += y[i] * direction[i % kUnit];
        of_x += x[i] * direction[i % kUnit];
      }
      return sum / of_x;
    };
    EXPECT_LT(along(name), 0.2) << name;
    EXPECT_GT(along(withUnit(name, kUnit)), 3 * along(name)) << name;
  }
}

// Activations of language models: one channel has nearly all of a token. The errors of a normal distribution are 0.343
// and 0.0975 of a block's size.
TEST_P(UnitCodecs, AChannelThatOutweighsAllOthersIsNotClipped) {
  constexpr size_t kUnit = 576, kCount = 32;
  std::vector<float> x = normal(kUnit * kCount, 5);
  for (size_t unit = 0; unit < kCount; ++unit)
    x[unit * kUnit + 507] = 60;
  for (const auto& [name, most] : {std::pair{"gauss2", 0.45}, {"gauss4", 0.13}}) {
    const auto codec = codecOf(withUnit(name, kUnit), *GetParam());
    const std::vector<float> y = decoded(*codec, encoded(*codec, x, kDraws), x.size());
    double error = 0, of_x = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      error += (y[i] - x[i]) * (y[i] - x[i]);
      of_x += x[i] * x[i];
    }
    EXPECT_LT(std::sqrt(error / of_x), most) << name;
  }
}

TEST(Units, AreRefusedWhereTheyCannotBe) {
  for (const char* text : {"sym4:axis=channel,C=8,unit=8", "minmax4:bucket=tensor,unit=8", "gauss4:unit=0",
                           "gauss4:unit=1099511627777", "levels4:unit=100", "bf16:unit=8", "topk:unit=8"}) {
    EXPECT_THROW(CodecSpec::parse(text), ValueError) << text;
  }
  for (const char* text :
       {"sym4:axis=channel,C=8", "minmax4:bucket=tensor", "topk", "topk:chunk=64,keep=8", "gauss4:unit=8"})
    EXPECT_THROW(CodecSpec::parse(text).withUnit(576), ValueError) << text;
  const auto codec = makeCodec(CodecSpec::parse("gauss4:unit=576"));
  EXPECT_THROW(codec->encodedBytes(577, DType::float32), ValueError);
  EXPECT_EQ(codec->granularity(), Codec::kUncut);
  EXPECT_EQ(codec->encodedBytes(0, DType::float32), 0u);
}

// Every size of a payload but its own, and a bit that belongs to no element.
TEST(Units, PayloadsOfPeersAreChecked) {
  const auto codec = makeCodec(CodecSpec::parse("minmax4:bucket=64,unit=100"));
  const std::vector<float> x = normal(300, 2);
  Bytes payload = encoded(*codec, x);
  std::vector<float> y(x.size());
  for (size_t size : {size_t{0}, payload.size() - 64, payload.size() - 1}) {
    EXPECT_THROW(codec->decode(y.data(), DType::float32, std::span(payload).first(size), 0, x.size()), WireError);
  }
  payload.back() = std::byte{1};  // 16 lanes of 3 rows of 4 bits: the upper 20 of a lane's word are nobody's
  EXPECT_THROW(codec->decode(y.data(), DType::float32, payload, 0, x.size()), WireError);
}

}  // namespace
}  // namespace lowcomm
