// Slots of few bits: both sides hold the same codes, and the receiver computes on what the codes do not show.
#include "pipeline/slot_store.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "boundary.h"

namespace lowcomm {
namespace {

using namespace test;

TEST(SlotFormat, SizesAndNames) {
  for (const auto& [store, bytes, name] :
       std::vector<std::tuple<std::string, size_t, std::string>>{{"fp32", 4 * kSample, "float32"},
                                                                 {"fp16", 2 * kSample, "float16"},
                                                                 {"bf16", 2 * kSample, "bfloat16"},
                                                                 {"sym8:axis=channel", 6272, "sym8:axis=channel,C=60"},
                                                                 {"minmax4:bucket=128", 3392, "minmax4:bucket=128"}}) {
    const SlotFormat format = SlotFormat::parse(store, kSample, 60);
    EXPECT_EQ(format.slotBytes(), bytes) << store;
    EXPECT_EQ(format.name(), name) << store;
  }
}

TEST(SlotFormat, Refuses) {
  const auto said = [](const std::string& store, uint64_t elements, uint64_t channels) {
    return thrownBy<ValueError>([&] { SlotFormat::parse(store, elements, channels); });
  };
  EXPECT_TRUE(holds(said("levels4", 100, 10), {"expected fp32, fp16, bf16 or a codec without a level table"}));
  EXPECT_TRUE(holds(said("none", 100, 10), {"expected fp32, fp16, bf16 or a codec"}));
  EXPECT_NE(said("sym9", 100, 10), kNothing);
  EXPECT_NE(said("sym4:axis=channel", 100, 30), kNothing) << "no whole rows";
  EXPECT_NE(said("fp16", 0, 1), kNothing);
}

// Whatever an activation does, its slot can be written and read again: a mistake that is sent is told of there.
TEST(SlotFormat, HoldsWhatItsCodecRefuses) {
  for (const std::string store :
       {"sym4:bucket=64", "gauss4", "bf16:nonfinite=poison", "minmax8:bucket=64", "topk:keep=0.1", "sign1"}) {
    SCOPED_TRACE(store);
    const SlotFormat format = SlotFormat::parse(store, kSample, 60);
    std::vector<float> x(kSample, 1), y(kSample);
    x[5] = NAN, x[700] = -INFINITY, x[1500] = std::numeric_limits<float>::max();
    std::vector<std::byte> slot(format.slotBytes());
    format.encode(x.data(), slot.data(), 1, 1);
    format.decode(slot.data(), y.data());
    for (float value : y)
      ASSERT_TRUE(std::isfinite(value));
  }
}

// Both sides draw the same numbers for one version of one sample, and others for the next.
TEST(SlotFormat, StochasticCodecsShareTheirDraws) {
  const SlotFormat format = SlotFormat::parse("qsgd2:bucket=64", kSample, 60);
  const auto slotOf = [&](uint64_t sample, uint32_t version) {
    std::vector<float> x = normal(kSample, 3);
    std::vector<std::byte> slot(format.slotBytes());
    format.encode(x.data(), slot.data(), sample, version);
    return slot;
  };
  EXPECT_EQ(slotOf(1, 1), slotOf(1, 1));
  EXPECT_NE(slotOf(1, 1), slotOf(1, 2));
  EXPECT_NE(slotOf(1, 1), slotOf(2, 1));
}

// y = m + deq(c) is not rounded to the slot's codes: with 8 bits of change on 2 bits of memory it is as near as 8 bits
// are.
TEST(SlotFormat, TheReceiverComputesOnTheSumItself) {
  Ranks ranks(2);
  Boundary boundary(ranks, codecsOf("minmax8:bucket=128", "minmax8:bucket=128"), DType::float32, "sym2:bucket=128");
  const Bytes x = activations(DType::float32, {1, 2}, 0);
  for (int visit = 0; visit < 3; ++visit)
    EXPECT_LT(distance(DType::float32, x, boundary.move(ranks, x, {1, 2}).y), 0.01);
  std::vector<std::byte> slot(boundary.memories[1]->format().slotBytes());
  std::vector<float> m(kSample);
  boundary.memories[1]->read(1, 3, slot.data());
  boundary.memories[1]->format().decode(slot.data(), m.data());
  double lost = 0;
  for (uint64_t i = 0; i < kSample; ++i)
    lost += std::abs(m[i] - toFloat(DType::float32, x.data() + 4 * i));
  EXPECT_GT(lost / kSample, 0.1) << "2 bits";
}

// Memories of other formats would drift apart.
TEST(SlotFormat, MemoriesOfOtherFormatsAreNamed) {
  const DeltaCodecs codecs = codecsOf("sym4:bucket=64", "");
  for (const auto& [one, another, said] : std::vector<std::array<std::string, 3>>{
           {"fp16", "fp32", "rank 0 has 'float16', rank 1 has 'float32'"},
           {"sym8:axis=channel", "sym4:axis=channel",
            "rank 0 has 'sym8:axis=channel,C=60', rank 1 has 'sym4:axis=channel,C=60'"}}) {
    Ranks ranks(2);
    Boundary boundary(ranks, codecs, DType::float32, one), other(ranks, codecs, DType::float32, another);
    boundary.channels[1] = other.channels[1];
    for (const std::string& error : boundary.move(ranks, activations(DType::float32, {1}, 0), {1}).errors)
      EXPECT_TRUE(holds(error, {"memory differs: " + said})) << error;
  }
}

}  // namespace
}  // namespace lowcomm
