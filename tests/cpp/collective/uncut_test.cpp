// Codecs that cannot be cut: one scale for a whole tensor, and their payloads in parts over the in-memory transport.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "oracles.h"

namespace lowcomm {
namespace {

using namespace test;

class TensorBucket : public test::EveryForm {};

INSTANTIATE_TEST_SUITE_P(Forms, TensorBucket, testing::ValuesIn(test::allForms()), test::formName);

// A tensor no longer than a bucket has one anyway: the bytes are the same.
TEST_P(TensorBucket, IsABucketThatIsLargeEnough) {
  for (const char* name : {"minmax1", "minmax4", "qsgd8", "lattice4", "sym5", "mid2", "sign1"}) {
    for (const char* options : {"", ",meta=bf16"}) {
      if (name[0] == 'l' && *options) continue;
      const auto c = test::codecOf(std::string(name) + ":bucket=tensor" + options, *GetParam());
      const auto large = test::codecOf(std::string(name) + ":bucket=65536" + options, *scalarKernels());
      for (size_t n : {0, 1, 15, 63, 64, 65, 511, 512, 513, 1000, 4097, 65535, 65536}) {
        const std::vector<float> x = normal(n, static_cast<uint32_t>(n));
        const Bytes payload = encoded(*c, x, {1, 2, 3});
        ASSERT_EQ(payload, encoded(*large, x, {1, 2, 3})) << name << " " << n;
        ASSERT_EQ(decoded(*c, payload, n), decoded(*large, payload, n)) << name << " " << n;
      }
    }
  }
}

TEST_P(TensorBucket, OneScaleForLongTensorsToo) {
  const size_t n = 300001;
  std::vector<float> x = normal(n, 1);
  x[123456] = 50;
  for (const char* name : {"minmax8", "qsgd4", "sym8", "sign1"}) {
    const auto c = test::codecOf(std::string(name) + ":bucket=tensor", *GetParam());
    const auto reference = test::codecOf(c->spec().str(), *scalarKernels());
    const Bytes payload = encoded(*c, x, {1, 2, 3});
    ASSERT_EQ(payload, encoded(*reference, x, {1, 2, 3})) << name;
    const std::vector<float> y = decoded(*c, payload, n);
    ASSERT_EQ(y, decoded(*reference, payload, n)) << name;
    EXPECT_EQ(payload.size(), 64 + 64 * (c->spec().bits * (n / 512) + 1u * (c->spec().bits * 31 + 31) / 32));
    float step = 0;
    std::memcpy(&step, payload.data() + (name[0] == 'm' || name[0] == 'q' ? 4 : 0), 4);
    for (size_t i = 0; i < n && name[1] != 'i'; ++i)
      ASSERT_LE(std::fabs(y[i] - x[i]), 1.0002 * step) << name << " " << i;
  }
}

TEST_P(TensorBucket, WhatIsNotFiniteAndMistakes) {
  std::vector<float> x = normal(3000, 1);
  x[2345] = INFINITY;
  const auto make = [&](const std::string& text) { return test::codecOf(text, *GetParam()); };
  EXPECT_EQ(test::refusedElement([&] { encoded(*make("minmax4:bucket=tensor"), x); }), 2345u);
  const auto poison = make("sym4:bucket=tensor,nonfinite=poison");
  for (float y : decoded(*poison, encoded(*poison, x), x.size()))
    ASSERT_TRUE(std::isnan(y));

  const auto c = make("minmax4:bucket=tensor");
  EXPECT_EQ(c->granularity(), Codec::kUncut);
  Bytes payload(c->encodedBytes(100, DType::float32));
  EXPECT_THROW(c->encode(payload, x.data(), DType::float32, 512, 100, {}), ValueError);
  EXPECT_THROW(c->encodedBytes((uint64_t{1} << 31) + 1, DType::float32), ValueError);
  EXPECT_NO_THROW(c->encodedBytes(uint64_t{1} << 31, DType::float32));
}

// Messages of many frames each, whose parts begin and end within other segments' frames.
const char* const kUncut[] = {"minmax8:bucket=tensor", "topk:keep=0.3", "topk:keep=0.01,values=qsgd8",
                              "qsgd8:axis=channel,C=50"};

Layout between(const std::string& codec) {
  const CodecSpec plain = CodecSpec::parse("minmax4:bucket=512"), uncut = CodecSpec::parse(codec);
  return Layout({{0, 70001, plain},
                 {70001, 250000, uncut},
                 {320001, 100, uncut},
                 {320101, 1000, plain},
                 {321101, 100000, uncut}});
}

TEST(Uncut, InPartsAsInOnePiece) {
  for (const char* codec : kUncut) {
    for (const Layout& layout : {single(400000, codec), between(codec)}) {
      for (int size : {1, 2, 3})
        test::expectGathers(size, {{layout, DType::float32}});
      test::expectScatters(3, {{layout, DType::float32}}, {}, /*in_place=*/false);
    }
  }
}

// A refused value is found with the first part, on whichever rank it is: every rank hears of it, and the group goes on.
TEST(Uncut, WhatIsNotFiniteIsNamedOnEveryRank) {
  for (const char* codec : kUncut) {
    for (int bad_slice : {0, 1}) {
      Ranks ranks(2);
      const uint64_t n = 400000;
      for (bool spoilt : {true, false}) {
        std::vector<std::vector<float>> slices(4, std::vector<float>(n, 1.0f));
        if (spoilt) slices[static_cast<size_t>(bad_slice)][n - 3] = NAN;  // of rank 0
        std::vector<std::vector<float>> outputs(2, std::vector<float>(n));
        const auto outcomes = ranks.run("reduce_scatter", [&](int rank, OpContext& op) {
          ScatterMessage message{{single(n, codec)}, DType::float32};
          for (int owner = 0; owner < 2; ++owner)
            message.inputs.push_back(slices[static_cast<size_t>(2 * rank + owner)].data());
          message.output = outputs[static_cast<size_t>(rank)].data();
          reduceScatter(op, {message}, {});
        });
        const std::string named = "element 399997 of the slice for rank " + std::to_string(bad_slice);
        if (spoilt) test::expectRefusedBy(0, outcomes, {named});
        EXPECT_EQ(outcomes[0].ok() && outcomes[1].ok(), !spoilt) << codec;
      }
    }
  }
}

}  // namespace
}  // namespace lowcomm
