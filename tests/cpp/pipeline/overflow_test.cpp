// Memories with a bound: samples without room travel by themselves, equally on both sides; and nothing else grows.
#include <gtest/gtest.h>
#include <malloc.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "boundary.h"

namespace lowcomm {
namespace {

using namespace test;

constexpr size_t kSlotBytes = 2 * kSample;

struct BoundedBoundary : Boundary {
  BoundedBoundary(Ranks& ranks, const DeltaCodecs& codecs, uint64_t sent_slots, uint64_t received_slots)
      : Boundary(ranks, codecs) {
    for (int rank : {0, 1}) {
      const uint64_t most = (rank == 0 ? sent_slots : received_slots) * kSlotBytes + 5;
      memories[rank] = std::make_shared<SampleMemory>(SlotFormat(kSample, DType::float16), most);
      channels[rank] = std::make_shared<BoundaryChannel>(std::make_shared<EngineQueue>(ranks.engine(rank)), 1 - rank, 3,
                                                         ChannelOptions{dtype, codecs, 7}, memories[rank]);
    }
  }
};

DeltaCodecs withOverflow(const std::string& overflow) {
  DeltaCodecs codecs = codecsOf("gauss4", "");
  codecs.overflow = codecsOf(overflow, "").seen;
  return codecs;
}

TEST(Overflow, SamplesWithoutRoomTravelByThemselves) {
  for (const std::string codec : {"minmax8:bucket=128", ""}) {
    SCOPED_TRACE(codec);
    Ranks ranks(2);
    BoundedBoundary boundary(ranks, withOverflow(codec), 3, 3);
    const std::vector<std::vector<uint64_t>> batches = {{1, 2}, {3, 4}, {5, 1, 4, 2}, {4, 3}};
    for (uint32_t visit = 0; visit < batches.size(); ++visit) {
      const Bytes x = activations(DType::float32, batches[visit], visit);
      const auto result = boundary.move(ranks, x, batches[visit]);
      ASSERT_EQ(result.errors[0] + result.errors[1], "");
      EXPECT_LT(distance(DType::float32, x, result.y), 0.02);
    }
    EXPECT_EQ(boundary.memories[0]->table(), boundary.memories[1]->table());
    for (const auto& memory : boundary.memories) {
      EXPECT_EQ(memory->bytes(), 3 * kSlotBytes);
      EXPECT_EQ(memory->counts().first, 3u);
      EXPECT_EQ(memory->counts().seen, 3u);
      EXPECT_EQ(memory->counts().overflow, 4u);
    }
    // A forgotten sample makes room.
    for (const auto& memory : boundary.memories)
      memory->forget(1, "differs");
    boundary.move(ranks, activations(DType::float32, {5}, 9), {5});
    EXPECT_EQ(boundary.memories[0]->version(5), 1u);
    EXPECT_EQ(boundary.memories[0]->counts().forgotten.at("differs"), 1u);
  }
}

TEST(Overflow, AMessageThatFailsGivesItsRoomBack) {
  Ranks ranks(2);
  BoundedBoundary boundary(ranks, withOverflow("minmax8"), 1, 1);
  Bytes x = activations(DType::float32, {1}, 0);
  reinterpret_cast<float*>(x.data())[5] = NAN;
  boundary.channels[0] = std::make_shared<BoundaryChannel>(
      std::make_shared<EngineQueue>(ranks.engine(0)), 1, 3,
      ChannelOptions{DType::float32, codecsOf("gauss4", "sym8"), 7}, boundary.memories[0]);
  EXPECT_NE(boundary.move(ranks, x, {1}).errors[0], "");
  EXPECT_EQ(boundary.memories[0]->admit(2), 0u);
  EXPECT_EQ(boundary.memories[0]->admit(3), kNotKept);
  boundary.memories[0]->release(2);
}

TEST(Overflow, SidesOfOtherBoundsAreNamed) {
  Ranks ranks(2);
  BoundedBoundary boundary(ranks, withOverflow(""), 2, 1);
  const auto result = boundary.move(ranks, activations(DType::float32, {1, 2}, 0), {1, 2});
  for (const std::string& error : result.errors)
    EXPECT_TRUE(holds(error, {"samples differs: rank 0 has '1@0,2@0', rank 1 has '1@0,2@-'"})) << error;
}

// After 10,000 messages the process has allocated what it had after 1,000.
TEST(Overflow, NothingGrowsWithTheMessages) {
  constexpr uint64_t kSmall = 64, kSamples = 8;
  Ranks ranks(2);
  std::shared_ptr<SampleMemory> memories[2];
  std::shared_ptr<BoundaryChannel> channels[2];
  for (int rank : {0, 1}) {
    memories[rank] = std::make_shared<SampleMemory>(SlotFormat::parse("sym8:bucket=64", kSmall, 1));
    channels[rank] = std::make_shared<BoundaryChannel>(
        std::make_shared<EngineQueue>(ranks.engine(rank)), 1 - rank, 3,
        ChannelOptions{DType::float32, codecsOf("sym4:bucket=64", "sym8:bucket=64"), 7}, memories[rank]);
  }
  const auto visits = [&](uint64_t from, uint64_t to) {
    together(ranks, [&](int rank, Engine&) {
      std::vector<float> x(kSmall, 1);
      for (uint64_t i = from; i < to; ++i) {
        x[i % kSmall] += 0.1f;
        const std::vector<uint64_t> sample = {i % kSamples};
        const auto message =
            rank == 0 ? channels[0]->send(x.data(), kSmall, sample) : channels[1]->recv(x.data(), kSmall, sample);
        message->wait();
      }
    });
    const auto used = mallinfo2();
    return used.uordblks + used.hblkhd;
  };
  const size_t early = visits(0, 1000), late = visits(1000, 10'000);
  EXPECT_LT(late, early + 64 * 1024);
  for (const auto& memory : memories) {
    EXPECT_EQ(memory->bytes(), kSamples * memory->format().slotBytes());
    EXPECT_EQ(memory->version(3), 10'000 / kSamples);
  }
}

}  // namespace
}  // namespace lowcomm
