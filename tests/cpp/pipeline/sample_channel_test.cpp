// Channels with a memory: both sides remember the same bits, whatever comes, and a refused message changes neither.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "boundary.h"

namespace lowcomm {
namespace {

using namespace test;

TEST(SampleChannel, BothSidesRememberTheSame) {
  for (const auto& [seen, first] : std::vector<std::pair<std::string, std::string>>{{"gauss2", "minmax8:bucket=128"},
                                                                                    {"sym4:bucket=64", ""},
                                                                                    {"minmax4:bucket=tensor", "sym8"},
                                                                                    {"qsgd4:bucket=512", "fp16"}}) {
    for (DType dtype : kFloats) {
      // A memory of few bits loses of each sum what it cannot hold, and the next change makes up for it.
      for (const std::string store : {"fp32", "fp16", "bf16", "sym8:axis=channel", "minmax4:bucket=128", "qsgd8"}) {
        SCOPED_TRACE(seen + " " + first + " " + dtypeName(dtype) + " " + store);
        Ranks ranks(2);
        Boundary boundary(ranks, codecsOf(seen, first), dtype, store);
        // Samples that were seen and that were not, in one batch, in changing company.
        const std::vector<std::vector<uint64_t>> batches = {{1, 2, 3}, {3, 4, 1}, {5, 4}, {1, 2, 3, 4, 5}};
        for (uint32_t visit = 0; visit < batches.size(); ++visit) {
          const Bytes x = activations(dtype, batches[visit], visit);
          const auto result = boundary.move(ranks, x, batches[visit]);
          ASSERT_EQ(result.errors[0] + result.errors[1], "");
          ASSERT_EQ(boundary.memories[0]->table(), boundary.memories[1]->table());
          ASSERT_LT(distance(dtype, x, result.y), 0.12) << visit;
        }
        const std::map<uint64_t, uint32_t> versions = {{1, 3}, {2, 2}, {3, 3}, {4, 3}, {5, 2}};
        for (const auto& [sample, version] : versions)
          EXPECT_EQ(boundary.memories[0]->version(sample), version) << sample;
        EXPECT_EQ(boundary.memories[0]->bytes(), 5 * SlotFormat::parse(store, kSample, 60).slotBytes());
        EXPECT_EQ(boundary.counted.first, 5u);
        EXPECT_EQ(boundary.counted.seen, 8u);
        EXPECT_LT(boundary.counted.changes, 0.3 * boundary.counted.values);
      }
    }
  }
}

// The second visit of a sample that has hardly moved is nearly exact at 2 bits: what travels is its change.
TEST(SampleChannel, ChangesAreWhatTravels) {
  Ranks ranks(2);
  Boundary boundary(ranks, codecsOf("gauss2", "minmax8:bucket=128"));
  Bytes x = activations(DType::float32, {1}, 0);
  boundary.move(ranks, x, {1});
  reinterpret_cast<float*>(x.data())[17] += 0.01f;
  EXPECT_LT(distance(DType::float32, x, boundary.move(ranks, x, {1}).y), 0.01);
}

TEST(SampleChannel, ARefusedMessageChangesNothing) {
  Ranks ranks(2);
  Boundary boundary(ranks, codecsOf("sym4:bucket=64", "minmax8:bucket=128"));
  const std::vector<uint64_t> samples = {1, 2};
  Bytes x = activations(DType::float32, samples, 0);
  boundary.move(ranks, x, samples);
  const auto before = boundary.memories[0]->table();
  Bytes spoilt = x;
  reinterpret_cast<float*>(spoilt.data())[kSample + 9] = NAN;
  const auto result = boundary.move(ranks, spoilt, samples);
  EXPECT_TRUE(holds(result.errors[0], {"nan", "element " + std::to_string(kSample + 9)}));
  EXPECT_TRUE(holds(result.errors[1], {"recv of channel 3", "could not send its part"}));
  EXPECT_EQ(boundary.memories[0]->table(), before);
  EXPECT_EQ(boundary.memories[1]->table(), before);
  EXPECT_EQ(boundary.move(ranks, x, samples).errors[0], "");
  EXPECT_EQ(boundary.memories[0]->table(), boundary.memories[1]->table());
}

TEST(SampleChannel, MemoriesThatDifferAreNamedWithSampleAndVersions) {
  Ranks ranks(2);
  Boundary boundary(ranks, codecsOf("sym4:bucket=64", "minmax8:bucket=128"));
  const Bytes x = activations(DType::float32, {1, 2}, 0);
  boundary.move(ranks, x, {1, 2});
  boundary.memories[1]->forget(2);
  const auto result = boundary.move(ranks, x, {1, 2});
  for (const std::string& error : result.errors)
    EXPECT_TRUE(holds(error, {"channel 3", "samples differs: rank 0 has '1@1,2@1', rank 1 has '1@1,2@0'"})) << error;
  EXPECT_EQ(boundary.memories[0]->version(1), 1u);
}

// A sample that two channels update at once is not committed twice.
TEST(SampleChannel, ASampleThatWasUpdatedMeanwhileIsRefused) {
  SampleMemory memory(SlotFormat(4, DType::float32));
  const std::vector<std::byte> slot(memory.format().slotBytes());
  memory.update(1, 0, slot.data());
  EXPECT_THROW(memory.update(1, 0, slot.data()), ValueError);
  memory.update(1, 1, slot.data());
  EXPECT_EQ(memory.version(1), 2u);
}

TEST(SampleChannel, MistakesAreFoundBeforeAnythingIsSent) {
  Ranks ranks(2);
  Boundary boundary(ranks, codecsOf("sym4:bucket=64", ""));
  const Bytes x = activations(DType::float32, {1, 2}, 0);
  BoundaryChannel& channel = *boundary.channels[0];
  EXPECT_THROW(channel.send(x.data(), 2 * kSample, {1, 1}), ValueError);
  EXPECT_THROW(channel.send(x.data(), 2 * kSample, {1}), ValueError);
  EXPECT_THROW(channel.send(x.data(), 2 * kSample, {}), ValueError);
  Bytes y = x;
  {
    const auto under_way = boundary.channels[1]->recv(y.data(), 2 * kSample, {1, 2});
    EXPECT_THROW(boundary.channels[1]->recv(y.data(), kSample, {2}), ValueError);
    const auto sent = channel.send(x.data(), 2 * kSample, {1, 2});
    under_way->wait();
    sent->wait();
    EXPECT_THROW(sent->wait(), ValueError);
  }
  EXPECT_EQ(boundary.move(ranks, x, {2, 1}).errors[0], "") << "they are no longer under way";
  {
    auto through = boundary.channels[1]->recv(y.data(), kSample, {1});
    const auto sent = channel.send(x.data(), kSample, {1});
    through->wait();
    sent->wait();
    const auto again = boundary.channels[1]->recv(y.data(), kSample, {1});
    through.reset();
    EXPECT_THROW(boundary.channels[1]->recv(y.data(), kSample, {1}), ValueError) << "it is under way again";
    const auto next = channel.send(x.data(), kSample, {1});
    again->wait();
    next->wait();
  }
  const auto queue = std::make_shared<EngineQueue>(ranks.engine(0));
  const auto memory = boundary.memories[0];
  EXPECT_THROW(BoundaryChannel(queue, 1, 0, {DType::int32, codecsOf("sym4", ""), 0}, memory), TypeError);
  EXPECT_THROW(BoundaryChannel(queue, 1, 0, {DType::float32, codecsOf("", ""), 0}, memory), ValueError);
  EXPECT_THROW(BoundaryChannel(queue, 0, 0, {}, nullptr), ValueError);
  EXPECT_THROW(BoundaryChannel(queue, 1, kChannels, {}, nullptr), ValueError);
  EXPECT_THROW(SlotFormat(0, DType::float32), ValueError);
  EXPECT_THROW(SlotFormat(5, DType::int8), TypeError);
}

// Without a memory tensors of any type travel exact, and floats in a codec.
TEST(SampleChannel, WithoutAMemory) {
  Ranks ranks(2);
  for (const auto& [dtype, codec] : std::vector<std::pair<DType, std::string>>{
           {DType::int64, ""}, {DType::bfloat16, ""}, {DType::float32, "gauss4"}}) {
    std::shared_ptr<BoundaryChannel> channels[2];
    for (int rank : {0, 1})
      channels[rank] = std::make_shared<BoundaryChannel>(std::make_shared<EngineQueue>(ranks.engine(rank)), 1 - rank, 3,
                                                         ChannelOptions{dtype, codecsOf(codec, ""), 7}, nullptr);
    const Bytes x = randomTensor(dtype, 5000, 3);
    Bytes y(x.size());
    together(ranks, [&, dtype = dtype](int rank, Engine&) {
      auto message = rank == 0 ? channels[0]->send(x.data(), 5000, {}) : channels[1]->recv(y.data(), 5000, {});
      message->wait();
    });
    EXPECT_TRUE(codec.empty() ? x == y : distance(dtype, x, y) < 0.2);
  }
}

}  // namespace
}  // namespace lowcomm
