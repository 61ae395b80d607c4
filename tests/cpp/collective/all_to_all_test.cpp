#include "collective/collectives.h"

#include <gtest/gtest.h>

#include <cmath>

#include "collective_cases.h"
#include "ranks_on_threads.h"

namespace lowcomm {
namespace {

using namespace test;

// The tensor that `from` sends `to`: sizes differ by pair, some are empty, and small parts go exact.
struct Pairs {
  int size;
  std::string codec;
  DType dtype;
  uint64_t unit;

  uint64_t count(int from, int to) const {
    const uint64_t n = (from + 2 * to) % 4 == 0 ? 0 : unit * static_cast<uint64_t>(1 + from + 3 * to);
    return test::wholeRows(n, codec);
  }
  Layout layout(int from, int to) const { return single(count(from, to), (from + to) % 3 == 0 ? "none" : codec); }
  Bytes tensor(int from, int to) const {
    return test::randomTensor(dtype, count(from, to), static_cast<uint32_t>(100 * from + to));
  }
};

TEST(AllToAll, PartsOfAnySizeArriveAsDecoded) {
  for (const std::string& codec : test::kCodecs) {
    for (int size : {1, 2, 3, 5}) {
      for (DType dtype : {DType::float32, DType::bfloat16}) {
        for (uint64_t unit : {uint64_t{100}, uint64_t{40000}}) {
          if (unit > 1000 && size != 3) continue;
          const Pairs pairs{size, codec, dtype, unit};
          Ranks ranks(size);
          std::vector<std::vector<Bytes>> outputs(size);
          ranks.expectRun("all_to_all", [&](int rank, OpContext& op) {
            AllToAllMessage message;
            message.dtype = dtype;
            message.draws = drawsOf(rank);
            std::vector<Bytes> inputs;
            for (int peer = 0; peer < size; ++peer) {
              message.sent.push_back(pairs.layout(rank, peer));
              message.got.push_back(pairs.layout(peer, rank));
              inputs.push_back(pairs.tensor(rank, peer));
              outputs[rank].emplace_back(pairs.count(peer, rank) * itemBytes(dtype), std::byte{0xdd});
            }
            for (int peer = 0; peer < size; ++peer) {
              message.inputs.push_back(inputs[peer].data());
              message.outputs.push_back(outputs[rank][peer].data());
            }
            allToAll(op, message);
          });
          for (int to = 0; to < size; ++to) {
            for (int from = 0; from < size; ++from) {
              const Bytes x = pairs.tensor(from, to);
              Draws draws = drawsOf(from).slot(static_cast<uint32_t>(to));
              const Bytes expected = from == to ? x : test::asDecoded(pairs.layout(from, to), dtype, x, draws);
              ASSERT_TRUE(outputs[to][from] == expected)
                  << codec << ": from " << from << " to " << to << " of " << size;
            }
          }
        }
      }
    }
  }
}

// Sizes that do not fit each other are named by the pair they are of, before any element travels.
TEST(AllToAll, PairsThatDisagreeAreNamed) {
  Ranks ranks(3);
  std::vector<float> memory(5000);
  const auto outcomes = ranks.run("all_to_all", [&](int rank, OpContext& op) {
    std::vector<std::vector<float>> outputs(3, std::vector<float>(1001));
    AllToAllMessage message;
    for (int peer = 0; peer < 3; ++peer) {
      message.sent.push_back(single(rank == 0 && peer == 2 ? 1001 : 1000, "minmax8"));
      message.got.push_back(single(1000, "minmax8"));
      message.inputs.push_back(memory.data());
      message.outputs.push_back(outputs[peer].data());
    }
    allToAll(op, message);
  });
  for (int rank : {0, 2}) {
    EXPECT_TRUE(outcomes[rank].is<PeerError>());
    EXPECT_TRUE(test::holds(outcomes[rank].what(), {"parts", "1001", "1000", "rank 0", "rank 2"}));
  }
}

TEST(AllToAll, WhatCannotBeSentIsNamedEverywhereAndTheGroupGoesOn) {
  Ranks ranks(3);
  for (int spoilt : {0, 1, 3}) {  // the part for rank 0, the one that rank 1 keeps, none
    std::vector<std::vector<float>> outputs(9, std::vector<float>(70000));
    const auto outcomes = ranks.run("all_to_all", [&](int rank, OpContext& op) {
      std::vector<std::vector<float>> inputs(3, std::vector<float>(70000, 1.0f));
      if (rank == 1 && spoilt < 3) inputs[spoilt][69999] = INFINITY;
      AllToAllMessage message;
      for (int peer = 0; peer < 3; ++peer) {
        message.sent.push_back(single(70000, "minmax8"));
        message.got.push_back(single(70000, "minmax8"));
        message.inputs.push_back(inputs[peer].data());
        message.outputs.push_back(outputs[3 * rank + peer].data());
      }
      allToAll(op, message);
    });
    if (spoilt < 3) test::expectRefusedBy(1, outcomes, {"element 69999"});
    for (const auto& outcome : outcomes)
      EXPECT_EQ(outcome.ok(), spoilt == 3) << outcome.what();
  }
}

TEST(AllToAll, WhatARankKeepsIsAsLongInAsOut) {
  Ranks ranks(1);
  std::vector<float> x(10), y(10);
  const auto outcomes = ranks.run("all_to_all", [&](int, OpContext& op) {
    allToAll(op, {DType::float32, {single(10, "none")}, {single(9, "none")}, {x.data()}, {y.data()}, {}});
  });
  EXPECT_TRUE(outcomes[0].is<ValueError>() && test::holds(outcomes[0].what(), {"10", "9"})) << outcomes[0].what();
}

}  // namespace
}  // namespace lowcomm
