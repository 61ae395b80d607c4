#include "collective/collectives.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>

#include "collective/exchange.h"
#include "ranks_on_threads.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using test::holds;
using test::Ranks;

TEST(Agree, PassesWhereAllSayTheSame) {
  for (int size = 1; size <= 12; ++size) {
    Ranks ranks(size);
    const KeyValues hello{{{"policy", "all_gather=qsgd8:bucket=1024"}, {"text", "two\nlines \\"}, {"empty", ""}}};
    for (int repeat = 0; repeat < 3; ++repeat) {
      for (const OpCounters& c : ranks.expectRun("agree", [&](int, OpContext& op) { agree(op, hello); })) {
        EXPECT_EQ(c.wire_bytes, (kFrameHeaderBytes + hello.text().size()) * (size - 1));
        EXPECT_EQ(c.received_bytes, c.wire_bytes);
      }
    }
  }
}

TEST(Agree, NamesTheFirstDifferenceOnEveryRankAndGoesOn) {
  for (int size : {2, 3, 7}) {
    for (int odd = 0; odd < size; ++odd) {
      Ranks ranks(size);
      const auto outcomes = ranks.run("set_policy", [&](int rank, OpContext& op) {
        agree(op, {{{"same", "x"}, {"policy", rank == odd ? "qsgd4" : "qsgd8"}, {"seed", std::to_string(rank)}}});
      });
      for (int rank = 0; rank < size; ++rank) {
        EXPECT_TRUE(outcomes[rank].is<PeerRefusal>());
        // Ranks that agree on the policy see the seed first, if they meet each other before the odd one.
        if (size == 2 || rank == odd) {
          EXPECT_TRUE(holds(outcomes[rank].what(), {"set_policy", "policy differs", "'qsgd4'", "'qsgd8'",
                                                    "rank " + std::to_string(odd), "sequence 1"}));
        }
      }
      ranks.expectRun("set_policy", [](int, OpContext& op) { agree(op, {{{"policy", "qsgd8"}}}); });
    }
  }
}

TEST(Agree, OneRankInManyIsFoundByAll) {
  Ranks ranks(5);
  const auto outcomes =
      ranks.run("set_policy", [](int rank, OpContext& op) { agree(op, {{{"min_bytes", rank == 3 ? "1" : "65536"}}}); });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.is<PeerRefusal>());
    EXPECT_TRUE(holds(outcome.what(), {"min_bytes differs", "rank 3 has '1'", "has '65536'"}));
  }
}

TEST(Agree, MissingFieldsAndReasons) {
  Ranks ranks(3);
  auto outcomes = ranks.run("agree", [](int rank, OpContext& op) {
    agree(op, rank == 1 ? KeyValues{{{"a", "1"}}} : KeyValues{{{"a", "1"}, {"b", "2"}}});
  });
  for (const auto& outcome : outcomes)
    EXPECT_TRUE(holds(outcome.what(), {"b differs", "rank 1 has none", "'2'"}));
  outcomes = ranks.run("agree", [](int rank, OpContext& op) {
    agree(op, rank == 2 ? KeyValues{{{"error", "no such codec"}}} : KeyValues{{{"a", "1"}}});
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.is<PeerRefusal>());
    EXPECT_TRUE(holds(outcome.what(), {"rank 2: no such codec"}));
  }
}

TEST(Agree, RefusesMoreThanAFrameHolds) {
  Ranks ranks(2);
  const size_t room = frameCapacity(kMinChunkBytes) - kFrameHeaderBytes;
  for (const auto& outcome :
       ranks.run("agree", [&](int, OpContext& op) { agree(op, {{{"a", std::string(room - 2, 'x')}}}); })) {
    EXPECT_TRUE(outcome.is<ValueError>());
    EXPECT_TRUE(holds(outcome.what(), {std::to_string(room), std::to_string(room + 1)}));
    EXPECT_EQ(outcome.counters.wire_bytes, 0u);
  }
  ranks.expectRun("agree", [&](int, OpContext& op) { agree(op, {{{"a", std::string(room - 3, 'x')}}}); });
}

TEST(Agree, DamagedHelloIsAFault) {
  Ranks ranks(3);
  std::atomic<bool> done{false};
  ranks.hub().tamper([&](int from, int to, Lane lane, std::span<std::byte> bytes) {
    if (from == 1 && to == 2 && lane == Lane::control && !done.exchange(true)) bytes.back() ^= std::byte{1};
  });
  const auto outcomes = ranks.run("agree", [](int, OpContext& op) { agree(op, {{{"a", "1"}}}); });
  EXPECT_TRUE(outcomes[2].is<PeerError>());
  EXPECT_FALSE(outcomes[2].is<PeerRefusal>());
  EXPECT_TRUE(holds(outcomes[2].what(), {"crc32c", "between rank 2 and rank 1"}));
}

TEST(Agree, AnotherEpochIsAFault) {
  Ranks ranks(2, [](int rank, GroupConfig& config) { config.epoch = 7 + rank; });
  const auto outcomes = ranks.run("agree", [](int, OpContext& op) { agree(op, {{{"a", "1"}}}); });
  EXPECT_TRUE(holds(outcomes[0].what(), {"epoch", "expected 7, got 8"}));
  EXPECT_TRUE(holds(outcomes[1].what(), {"epoch", "expected 8, got 7"}));
}

}  // namespace
}  // namespace lowcomm
