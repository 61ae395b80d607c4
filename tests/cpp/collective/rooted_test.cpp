#include "collective/collectives.h"

#include <gtest/gtest.h>

#include <cmath>

#include "collective_cases.h"
#include "ranks_on_threads.h"

namespace lowcomm {
namespace {

using namespace test;

TEST(Broadcast, EverybodyHasWhatTheRootsCodesSay) {
  for (const std::string& codec : test::kCodecs) {
    for (int size : {1, 2, 4}) {
      Ranks ranks(size);
      for (DType dtype : test::kFloats) {
        for (uint64_t any : {uint64_t{0}, uint64_t{700}, uint64_t{200000}}) {
          const uint64_t n = test::wholeRows(any, codec);
          const int root = size / 2;
          const Bytes x = test::randomTensor(dtype, n, 1);
          std::vector<Bytes> data(size, Bytes(x.size(), std::byte{0xdd}));
          data[root] = x;
          ranks.expectRun("broadcast", [&](int rank, OpContext& op) {
            broadcast(op, {{n, CodecSpec::parse(codec), dtype, data[rank].data(), drawsOf(rank)}}, root);
          });
          const Bytes expected = test::asDecoded(single(n, codec), dtype, x, drawsOf(root));
          for (int rank = 0; rank < size; ++rank)
            ASSERT_TRUE(data[rank] == expected) << codec << ": rank " << rank << " of " << size << ", " << n;
        }
      }
    }
  }
}

TEST(Gather, TheRootHasWhatEverybodysCodesSay) {
  for (const std::string& codec : test::kCodecs) {
    for (int size : {1, 2, 4}) {
      Ranks ranks(size);
      for (uint64_t any : {uint64_t{0}, uint64_t{700}, uint64_t{200000}}) {
        const uint64_t n = test::wholeRows(any, codec);
        const int root = size - 1;
        std::vector<Bytes> inputs, outputs(size, Bytes(n * 2, std::byte{0xdd}));
        for (int rank = 0; rank < size; ++rank)
          inputs.push_back(test::randomTensor(DType::bfloat16, n, static_cast<uint32_t>(rank)));
        const auto counters = ranks.expectRun("gather", [&](int rank, OpContext& op) {
          RootGatherMessage message{
              n, CodecSpec::parse(codec), DType::bfloat16, inputs[rank].data(), {}, drawsOf(rank)};
          for (Bytes& output : outputs) {
            if (rank == root) message.outputs.push_back(output.data());
          }
          gather(op, {message}, root);
        });
        for (int rank = 0; rank < size; ++rank) {
          const Bytes expected = test::asDecoded(single(n, codec), DType::bfloat16, inputs[rank], drawsOf(rank));
          ASSERT_TRUE(outputs[rank] == expected) << codec << ": of rank " << rank << " of " << size << ", " << n;
          EXPECT_EQ(counters[rank].raw_bytes, rank == root ? 0 : n * 2);
        }
      }
    }
  }
}

TEST(Scatter, EveryRankHasItsPart) {
  for (int size : {1, 2, 4}) {
    Ranks ranks(size);
    for (uint64_t n : {uint64_t{0}, uint64_t{1}, uint64_t{700}, uint64_t{200000}}) {
      const int root = size / 2;
      std::vector<Bytes> inputs, outputs(size, Bytes(n * 2, std::byte{0xdd}));
      for (int rank = 0; rank < size; ++rank)
        inputs.push_back(test::randomTensor(DType::bfloat16, n, static_cast<uint32_t>(rank)));
      const auto counters = ranks.expectRun("scatter", [&](int rank, OpContext& op) {
        RootScatterMessage message{n, DType::bfloat16, {}, outputs[rank].data()};
        for (const Bytes& input : inputs) {
          if (rank == root) message.inputs.push_back(input.data());
        }
        scatter(op, {message}, root);
      });
      for (int rank = 0; rank < size; ++rank) {
        ASSERT_TRUE(outputs[rank] == inputs[rank]) << "of rank " << rank << " of " << size << ", " << n;
        EXPECT_EQ(counters[rank].raw_bytes, rank == root ? (size - 1) * n * 2 : 0);
      }
    }
  }
}

TEST(Rooted, RanksThatDisagreeOnTheRootAreNamed) {
  Ranks ranks(3);
  std::vector<std::vector<float>> data(3, std::vector<float>(1000));
  const auto outcomes = ranks.run("broadcast", [&](int rank, OpContext& op) {
    broadcast(op, {{1000, CodecSpec::parse("minmax8"), DType::float32, data[rank].data(), {}}}, rank == 2 ? 1 : 0);
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.is<PeerError>()) << outcome.what();
    EXPECT_TRUE(test::holds(outcome.what(), {"root"}));
  }
}

TEST(Rooted, WhatTheRootCannotSendIsNamedEverywhereAndTheGroupGoesOn) {
  Ranks ranks(3);
  for (bool spoilt : {true, false}) {
    std::vector<std::vector<float>> data(3, std::vector<float>(300000, 1.0f));
    if (spoilt) data[1][299999] = NAN;
    const auto outcomes = ranks.run("broadcast", [&](int rank, OpContext& op) {
      broadcast(op, {{300000, CodecSpec::parse("minmax8"), DType::float32, data[rank].data(), {}}}, 1);
    });
    if (spoilt) test::expectRefusedBy(1, outcomes, {"element 299999"});
    for (const auto& outcome : outcomes)
      EXPECT_EQ(outcome.ok(), !spoilt) << outcome.what();
  }
}

TEST(Rooted, ARootIsOneOfTheRanks) {
  Ranks ranks(2);
  std::vector<float> x(10);
  for (int root : {-1, 2, 100000}) {
    const auto sent = ranks.run("broadcast", [&](int, OpContext& op) {
      broadcast(op, {{10, CodecSpec::parse("minmax8"), DType::float32, x.data(), {}}}, root);
    });
    const auto gathered = ranks.run("gather", [&](int, OpContext& op) {
      gather(op, {{10, CodecSpec::parse("minmax8"), DType::float32, x.data(), {}, {}}}, root);
    });
    for (const auto* outcomes : {&sent, &gathered}) {
      for (const auto& outcome : *outcomes)
        EXPECT_TRUE(outcome.is<ValueError>() && test::holds(outcome.what(), {"0...1", std::to_string(root)}));
    }
  }
}

}  // namespace
}  // namespace lowcomm
