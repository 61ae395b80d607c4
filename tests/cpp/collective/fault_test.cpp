// Peers and networks that fail: damaged frames, dead ranks, stalled ones. Every live rank ends with a named cause, none
// hangs, and nothing wrong is taken for right.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <random>

#include "collective/collectives.h"
#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "collective_cases.h"
#include "ranks_on_threads.h"
#include "side_by_side.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using std::chrono::milliseconds;
using namespace test;

constexpr uint64_t kElements = 6 * 16384 + 5;  // seven rounds: more than the window

// all_gather of rank·kElements..., checked where it succeeds.
void gather(int rank, OpContext& op) {
  const auto values = [](int owner) {
    std::vector<float> x(kElements);
    for (uint64_t i = 0; i < kElements; ++i)
      x[i] = static_cast<float>(owner * 1000 + i % 997);
    return x;
  };
  const std::vector<float> input = values(rank);
  std::vector<std::vector<float>> outputs(op.group.size(), std::vector<float>(kElements, -1));
  GatherMessage message{{test::single(kElements, "none")}, DType::float32, input.data()};
  for (auto& output : outputs)
    message.outputs.push_back(output.data());
  allGather(op, {message});
  for (int owner = 0; owner < op.group.size(); ++owner)
    EXPECT_TRUE(outputs[owner] == values(owner)) << "rank " << rank << " took wrong data of rank " << owner;
}

// Zeros from every rank to every other, with `at_round` called before a rank encodes a round.
class SendZeros final : public Phase {
 public:
  SendZeros(int ranks, const MessagePlan& plan, std::function<void(size_t round)> at_round)
      : at_round_(std::move(at_round)) {
    out.assign(ranks, &plan);
    in = out;
    same_to_all = true;
  }

  void encode(size_t k, int /*peer*/, std::span<std::byte> payload) override {
    at_round_(k);
    std::memset(payload.data(), 0, payload.size());
  }
  void absorb(size_t /*k*/, const Payloads& /*payloads*/) override {}

 private:
  const std::function<void(size_t round)> at_round_;
};

void exchange(OpContext& op, const std::function<void(size_t round)>& at_round) {
  const MessagePlan plan = planMessage(test::single(12 * 16384, "none"), DType::float32, kMinChunkBytes);
  SendZeros phase(op.size(), plan, at_round);
  runExchange(op, {describe(op.op, {plan}), {}, {&phase}});
}

struct Damage {
  const char* name;
  int frame;  // of those from rank 1 to rank 2; 0 is the description
  std::function<void(std::span<std::byte>)> apply;
  const char* part;  // of every rank's error
};

// The receiver fails in the op, with the field; the others in the op or the next one, with the receiver's reason.
void expectNamed(const Damage& damage) {
  SCOPED_TRACE(damage.name);
  Ranks ranks(3);
  std::atomic<int> seen{0};
  ranks.hub().tamper([&](int from, int to, Lane lane, std::span<std::byte> bytes) {
    if (lane == Lane::bulk && from == 1 && to == 2 && seen++ == damage.frame) damage.apply(bytes);
  });
  const auto first = ranks.run("all_gather", gather);
  const auto second = ranks.run("all_gather", gather);
  EXPECT_TRUE(first[2].is<PeerError>());
  EXPECT_TRUE(holds(first[2].what(), {"between rank 2 and rank 1", damage.part, "op all_gather", "sequence 1"}));
  for (int rank = 0; rank < 3; ++rank) {
    const Outcome& failed = first[rank].ok() ? second[rank] : first[rank];
    EXPECT_TRUE(failed.is<PeerError>()) << rank;
    EXPECT_TRUE(holds(failed.what(), {"rank 2", damage.part})) << rank;
    EXPECT_TRUE(second[rank].is<PeerError>()) << rank;
    EXPECT_TRUE(holds(ranks.engine(rank).endedWhy(), {damage.part})) << rank;
  }
}

TEST(Fault, DamagedFramesAreNamedOnEveryRank) {
  const auto flip = [](size_t at) {
    return [at](std::span<std::byte> bytes) { bytes[at < bytes.size() ? at : bytes.size() - 1] ^= std::byte{4}; };
  };
  const auto cut = [](double keep) {
    // The rest that a truncated message leaves in a receive buffer that was zero.
    return [keep](std::span<std::byte> bytes) {
      const auto rest = bytes.subspan(static_cast<size_t>(keep * static_cast<double>(bytes.size())));
      std::memset(rest.data(), 0, rest.size());
    };
  };
  const std::vector<Damage> damages = {
      {"payload", 2, flip(1000), "crc32c: expected"},
      {"last byte of the last frame", 7, flip(1 << 30), "crc32c: expected"},
      {"sequence", 1, flip(32), "crc32c: expected"},
      {"magic", 3, flip(0), "magic: expected"},
      {"version", 3, flip(4), "version: expected 2"},
      {"length past the buffer", 4, [](std::span<std::byte> b) { std::memset(b.data() + 56, 0xff, 4); },
       "payload_bytes: expected at most"},
      {"truncated payload", 5, cut(0.5), "crc32c: expected"},
      {"truncated to nothing", 5, cut(0), "magic: expected"},
      {"description", 0, flip(70), "crc32c: expected"},
  };
  // Side by side: most of a failed group's time is patience.
  sideBySide(damages.size(), [&](int i) { expectNamed(damages[i]); });
}

TEST(Fault, NoDamageGoesUnnoticed) {
  sideBySide(12, [](int seed) {
    std::mt19937 generator(seed);
    const int frame = static_cast<int>(generator() % 8), from = static_cast<int>(generator() % 3);
    const int to = (from + 1 + static_cast<int>(generator() % 2)) % 3;
    const uint32_t position = generator(), bit = generator() % 8;
    Ranks ranks(3);
    std::atomic<int> seen{0};
    ranks.hub().tamper([&](int f, int t, Lane lane, std::span<std::byte> bytes) {
      if (lane != Lane::bulk || f != from || t != to || seen++ != frame) return;
      bytes[position % bytes.size()] ^= std::byte{1} << bit;
    });
    const auto outcomes = ranks.run("all_gather", gather);
    EXPECT_TRUE(outcomes[to].is<PeerError>()) << "seed " << seed;
    EXPECT_TRUE(holds(outcomes[to].what(), {"between rank " + std::to_string(to) + " and rank "})) << "seed " << seed;
  });
}

TEST(Fault, KilledRankIsNamed) {
  // Side by side: most of a failed group's time is patience.
  sideBySide(4, [](int i) {
    const size_t round = i / 2 * 5;
    const int size = i % 2 ? 4 : 2;
    Ranks ranks(size);
    const auto outcomes = ranks.run("all_gather", [&](int rank, OpContext& op) {
      exchange(op, [&](size_t at) {
        if (rank == 1 && at == round) ranks.hub().kill(1);
      });
    });
    for (int rank = 0; rank < size; ++rank) {
      if (rank == 1) continue;
      EXPECT_TRUE(outcomes[rank].is<PeerError>());
      EXPECT_TRUE(holds(outcomes[rank].what(), {"op all_gather", "sequence 1", "rank 1", "connection closed by peer"}));
    }
  });
}

TEST(Fault, StalledRankPastTheDeadlineIsNamed) {
  Ranks ranks(3, [](int, GroupConfig& config) {
    config.timeout = milliseconds(1000);
    config.global_ranks = {10, 11, 12};
    config.group = "outer";
  });
  ranks.expectRun("barrier", [](int, OpContext&) {});
  // The stalled rank is never resumed: what ends the op on every rank is its progress deadline.
  const auto outcomes = ranks.run("all_gather", [&](int rank, OpContext& op) {
    exchange(op, [&](size_t at) {
      if (rank == 1 && at == 6) ranks.hub().stall(1);
    });
  });
  for (int rank : {0, 2}) {
    EXPECT_TRUE(outcomes[rank].is<PeerError>());
    const std::string what = outcomes[rank].what();
    EXPECT_TRUE(holds(
        what, {"op all_gather", "sequence 2", "group outer", "rank " + std::to_string(rank) + " (global 1",
               "rank 1 (global 11)", "no byte for 1000 ms", "bytes sent ", "elapsed ", "progress deadline 1000 ms"}));
    EXPECT_FALSE(holds(what, {"bytes received 0,"})) << what;
    EXPECT_GT(outcomes[rank].counters.received_bytes, 0u);
  }
  EXPECT_TRUE(outcomes[1].is<PeerError>());
  for (const Outcome& outcome : ranks.run("all_gather", gather))
    EXPECT_TRUE(holds(outcome.what(), {"lost group", "First cause", "no byte for 1000 ms"}));
}

TEST(Fault, StallShorterThanTheDeadlineRecovers) {
  Ranks ranks(3);
  ranks.hub().stall(1);
  std::thread resumes([&] {
    std::this_thread::sleep_for(milliseconds(150));
    ranks.hub().resume(1);
  });
  ranks.expectRun("all_gather", gather);
  resumes.join();
  ranks.expectRun("all_gather", gather);
}

// The deadline is one of progress: an op may take longer than it, as long as frames keep coming.
TEST(Fault, SlowProgressIsNoFault) {
  constexpr milliseconds kProgress{2000};
  Ranks ranks(2, [&](int, GroupConfig& config) { config.timeout = kProgress; });
  ranks.expectRun("all_gather", [&](int rank, OpContext& op) {
    exchange(op, [&](size_t) {
      if (rank == 1) std::this_thread::sleep_for(milliseconds(250));
    });
    EXPECT_GT(OpContext::Clock::now() - op.start, kProgress);
  });
}

// A rank that gives up tells why in a buffer that no late frame of the failed op can overwrite.
TEST(Fault, LateFramesDoNotSpoilTheNotice) {
  MemoryHub hub(2);
  auto peer = hub.transport(1);
  Engine engine(hub.transport(0), {.chunk_bytes = kMinChunkBytes, .timeout = milliseconds(20000)});
  std::promise<std::string> failed;
  engine.submit(
      "all_gather", [](OpContext& op) { gather(0, op); },
      [&](std::exception_ptr error, const OpCounters&) { failed.set_value(Outcome(error, {}).what()); });
  constexpr uint32_t kTag = kOpTags;  // the first op's
  const Bytes garbage(kFrameHeaderBytes + 100, std::byte{0x5a});
  Bytes notice(frameCapacity(kMinChunkBytes)), frame(notice.size());
  std::vector<std::unique_ptr<Transfer>> transfers;
  transfers.push_back(peer->isend(Lane::bulk, 0, kTag, garbage));  // the description, to be refused
  for (size_t i = 0; i < 1 + SendWindow::kMost; ++i)
    transfers.push_back(peer->irecv(Lane::bulk, 0, kTag, frame));
  std::this_thread::sleep_for(milliseconds(50));
  for (size_t i = 0; i < SendWindow::kMost; ++i)
    transfers.push_back(peer->isend(Lane::bulk, 0, kTag, garbage));
  std::this_thread::sleep_for(milliseconds(20));
  peer->irecv(Lane::control, 0, 1, notice)->wait(milliseconds(5000));
  const FrameHeader header = openFrame(notice);
  EXPECT_EQ(header.kind, FrameKind::error);
  EXPECT_TRUE(holds(failed.get_future().get(), {"magic"}));
  peer->cancel(Lane::bulk);
}

}  // namespace
}  // namespace lowcomm
