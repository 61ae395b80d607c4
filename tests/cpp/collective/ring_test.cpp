// all_gather of parts that differ in size, direct and around a ring.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>

#include "oracles.h"

namespace lowcomm {
namespace {

using test::expectGathers;
using test::Ranks;
using test::single;
using Tensor = test::TensorKind;

// One tensor, of which each rank has so many elements.
Tensor parts(const std::vector<uint64_t>& counts, const std::string& codec, DType dtype = DType::float32) {
  std::vector<Layout> layouts;
  for (uint64_t count : counts)
    layouts.push_back(single(test::wholeRows(count, codec), codec));
  return {layouts, dtype};
}

Ranks::Configure ringFrom(int ranks) {
  return [ranks](int, GroupConfig& config) { config.ring_from = ranks; };
}

std::vector<uint64_t> counts(int size, uint64_t unit) {
  std::vector<uint64_t> counts;
  for (int rank = 0; rank < size; ++rank)
    counts.push_back(rank % 3 == 1 ? 0 : unit * static_cast<uint64_t>(1 + rank % 4) + static_cast<uint64_t>(rank));
  return counts;
}

TEST(Ring, RelaysWhatTheDirectExchangeSends) {
  for (int size : {2, 3, 4, 12}) {
    Ranks direct(size), ring(size, ringFrom(2));
    for (const std::string& codec : test::kCodecs) {
      const uint64_t unit = size == 3 ? 90000 : 700;
      const std::vector<Tensor> tensors = {parts(counts(size, unit), codec),
                                           parts(std::vector<uint64_t>(size, unit), codec, DType::bfloat16)};
      const auto sent = expectGathers(direct, tensors), relayed = expectGathers(ring, tensors);
      uint64_t all = 0, all_relayed = 0, raw = 0, raw_relayed = 0;
      for (int rank = 0; rank < size; ++rank) {
        all += sent[rank].wire_bytes;
        all_relayed += relayed[rank].wire_bytes;
        raw += sent[rank].raw_bytes;
        raw_relayed += relayed[rank].raw_bytes;
      }
      EXPECT_EQ(all, all_relayed) << codec;
      EXPECT_EQ(raw, raw_relayed) << codec;
    }
  }
}

TEST(Ring, CountsWhatEachRankSendsOn) {
  Ranks ranks(3, ringFrom(3));
  const auto counters = expectGathers(ranks, {parts({100000, 0, 5}, "none")});
  EXPECT_EQ(counters[0].raw_bytes, 4 * 100005u);  // its own, and rank 2's
  EXPECT_EQ(counters[1].raw_bytes, 4 * 100000u);
  EXPECT_EQ(counters[2].raw_bytes, 4 * 5u);
}

TEST(Ring, OnlyFromSoManyRanksOn) {
  for (int from : {0, 4, 5}) {
    Ranks ranks(4, ringFrom(from));
    std::array<std::atomic<uint64_t>, 16> bytes{};
    ranks.hub().tamper([&](int sender, int receiver, Lane lane, std::span<std::byte> frame) {
      if (lane == Lane::bulk) bytes[4 * sender + receiver] += frame.size();
    });
    expectGathers(ranks, {parts(std::vector<uint64_t>(4, 100000), "minmax8")});
    const uint64_t neighbour = bytes[4 * 0 + 1], other = bytes[4 * 0 + 2];
    if (from == 4) {
      EXPECT_GT(neighbour, 300000u);  // three parts
      EXPECT_LT(other, 1000u);        // the description
    } else {
      EXPECT_GT(other, 100000u);
      EXPECT_EQ(neighbour, other);
    }
  }
}

// The news of what cannot be sent goes around, whoever has it and when.
TEST(Ring, WhatCannotBeSentIsNamedEverywhereAndTheGroupGoesOn) {
  const uint64_t n = 6 * 57344 + 13;
  for (int size : {3, 4, 12}) {
    Ranks ranks(size, ringFrom(2));
    for (uint64_t at : {uint64_t{0}, n - 1}) {
      const int bad = static_cast<int>(at % static_cast<uint64_t>(size));
      std::vector<std::vector<float>> inputs(size, std::vector<float>(n, 1.0f));
      inputs[bad][at] = NAN;
      const auto outcomes = ranks.run("all_gather", [&](int rank, OpContext& op) {
        std::vector<std::vector<float>> outputs(size, std::vector<float>(n));
        GatherMessage message{{single(n, "qsgd8:bucket=64")}, DType::float32, inputs[rank].data()};
        for (auto& output : outputs)
          message.outputs.push_back(output.data());
        allGather(op, {message});
      });
      test::expectRefusedBy(bad, outcomes, {"element " + std::to_string(at)});
    }
    expectGathers(ranks, {parts(std::vector<uint64_t>(size, 1000), "minmax8")});
  }
}

// Frames that take k connections in turn stay in order on each.
TEST(Connections, FramesTakeThemInTurn) {
  for (int connections : {2, 3, 8}) {
    Ranks ranks(3, [&](int, GroupConfig& config) {
      config.connections = connections;
      config.ring_from = connections == 3 ? 3 : 0;
    });
    for (int op = 0; op < 3; ++op)
      expectGathers(ranks, {parts({500000, 0, 300001}, "none"), parts({100, 70000, 5}, "minmax8")});
  }
}

}  // namespace
}  // namespace lowcomm
