// Messages that go wrong: frames that are not what they should be, tensors that differ, peers that never come. The
// receiver says what it expected and what it got, its group is over, and the sender hears why.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>

#include "base/error.h"
#include "base/hashes.h"
#include "p2p_cases.h"
#include "side_by_side.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using std::chrono::milliseconds;
using namespace test;

constexpr uint64_t kElements = 500'000;  // several frames

void rewrite(std::span<std::byte> bytes, const std::function<void(FrameHeader&)>& change) {
  FrameHeader header = openFrame(bytes);
  change(header);
  sealFrame(bytes.first(kFrameHeaderBytes + header.payload_bytes), header);
}

// The receiver fails with `part`, and so does what it does next; the sender, whose frames were all taken, learns it
// with its next message.
void expectNamed(Ranks& ranks, const Outcome& failed, const std::vector<std::string>& parts) {
  EXPECT_TRUE(failed.is<PeerError>());
  EXPECT_TRUE(
      holds(failed.what(), {"recv with tag 5 failed between rank 1 and rank 0", "bytes received ", "elapsed "}));
  EXPECT_TRUE(holds(failed.what(), parts));
  EXPECT_TRUE(holds(ranks.engine(1).endedWhy(), parts));
  Tensor again = Tensor::random(10, 1);
  const test::PostedReceive later = test::postRecv(ranks.engine(1), again, 0, 5);
  EXPECT_TRUE(holds(later.outcome.what(), {"recv with tag 5", "lost group", "First cause"}));
  const test::PostedReceive next = test::postSend(ranks.engine(0), again, 1, 9);
  const Outcome told = next.outcome.ok() ? finish(ranks.engine(0), next.message) : next.outcome;
  EXPECT_TRUE(holds(told.what(), {"send with tag 9", "rank 1", "gave the group up"}));
  EXPECT_TRUE(holds(told.what(), parts));
}

TEST(P2pFault, SpoiltFramesAreNamed) {
  const auto cut = [](std::span<std::byte> b) {
    const auto rest = b.subspan(b.size() / 2);
    std::memset(rest.data(), 0, rest.size());
  };
  const auto field = [](const std::function<void(FrameHeader&)>& change) {
    return [change](std::span<std::byte> bytes) { rewrite(bytes, change); };
  };
  struct Damage {
    int frame;
    std::function<void(std::span<std::byte>)> apply;
    const char* part;
  };
  const std::vector<Damage> damages = {
      {1, [](std::span<std::byte> b) { b[b.size() - 1] ^= std::byte{1}; }, "crc32c: expected"},
      {0, [](std::span<std::byte> b) { b[0] ^= std::byte{1}; }, "magic: expected"},
      {2, cut, "crc32c: expected"},
      {1, field([](FrameHeader& h) { h.sequence = 7; }), "sequence: expected 1, got 7"},
      {1, field([](FrameHeader& h) { h.epoch = 4; }), "epoch: expected 5, got 4"},
      {1, field([](FrameHeader& h) { h.first += 512; }), "first: expected "},
      {1, field([](FrameHeader& h) { h.elements -= 512; }), "elements: expected "},
      {0, field([](FrameHeader& h) { h.flags = kBf16Flag; }), "flags: expected 0, got 4"},
      {0, field([](FrameHeader& h) { h.channel = 3; }), "channel: expected 0, got 3"},
      {0, field([](FrameHeader& h) { h.payload_bytes = 64; }), "payload_bytes: expected "},
  };
  // Side by side: most of a failed group's time is patience.
  sideBySide(damages.size(), [&](int i) {
    const Damage& damage = damages[i];
    SCOPED_TRACE(damage.part);
    Ranks ranks(2, [](int, GroupConfig& config) { config.epoch = 5; });
    std::atomic<int> seen{0};
    ranks.hub().tamper([&](int from, int, Lane lane, std::span<std::byte> bytes) {
      if (lane == Lane::bulk && from == 0 && seen++ == damage.frame) damage.apply(bytes);
    });
    const Tensor sent = Tensor::random(kElements, 1);
    Tensor got = sent.empty();
    const auto waiting = receiving(ranks.engine(1), got, 0, 5);
    const auto going = sending(ranks.engine(0), sent, 1, 5);
    const Outcome failed = finish(ranks.engine(1), waiting);
    expectNamed(ranks, failed, {damage.part});
  });
}

// A peer played by hand sends frames of its choice.
struct ByHand {
  MemoryHub hub{2};
  std::unique_ptr<Transport> peer = hub.transport(0);
  std::vector<std::vector<Bytes>> messages;  // their frames
  std::vector<std::unique_ptr<Transfer>> transfers;
  Engine engine{hub.transport(1), {.chunk_bytes = kMinChunkBytes, .timeout = milliseconds(20000)}};

  // Adds a message with the number `sequence`, of whose frames `which` are sent, in this order.
  void add(const Tensor& tensor, uint32_t sequence, const std::vector<size_t>& which) {
    std::vector<Bytes>& frames = messages.emplace_back();
    const MessagePlan plan = tensor.plan(engine);
    for (size_t i : which) {
      const Frame& chunk = plan.frames[i];
      FrameHeader header = plan.header(chunk);
      header.sequence = sequence;
      header.key_hash =
          fnv1a("dtype=float32\nelements=" + std::to_string(tensor.elements) + "\ncodec=" + tensor.codec + "\n");
      Bytes frame(kFrameHeaderBytes + chunk.payload_bytes);
      std::byte* payload = frame.data() + kFrameHeaderBytes;
      for (const Run& run : chunk.runs) {
        run.encode({payload, run.bytes}, tensor.data.data() + run.at * itemBytes(tensor.dtype), tensor.dtype,
                   tensor.draws);
        payload += run.bytes;
      }
      sealFrame(frame, header);
      frames.push_back(std::move(frame));
    }
  }

  // The outcome of the receive of two such messages.
  std::vector<Outcome> receive(const Tensor& like) {
    Tensor into[] = {like.empty(), like.empty()};
    std::vector<MessagePtr> receives;
    for (Tensor& tensor : into)
      receives.push_back(receiving(engine, tensor, 0, 5));
    for (const std::vector<Bytes>& frames : messages) {
      Bytes frame(kFrameHeaderBytes + AnnouncementBoard::kMaxText);
      peer->irecv(Lane::control, 1, 3, frame)->wait(milliseconds(5000));
      const Announcement announcement = Announcement::parse(openControlText(frame, engine.group().epoch).text);
      for (const Bytes& data : frames)
        transfers.push_back(peer->isend(Lane::bulk, 1, announcement.first_tag, data));
    }
    std::vector<Outcome> outcomes;
    for (size_t i : {0, 1}) {
      outcomes.push_back(finish(engine, receives[i]));
      if (outcomes.back().ok()) EXPECT_TRUE(into[i].data == like.received()) << i;
    }
    peer->cancel(Lane::bulk);
    return outcomes;
  }
};

TEST(P2pFault, MissingStaleAndRepeatedFramesAreNamed) {
  const Tensor tensor = Tensor::random(kElements, 1);
  {
    ByHand by_hand;
    by_hand.add(tensor, 1, {0, 1, 2, 3});
    by_hand.add(tensor, 2, {0, 1, 2, 3});
    for (const Outcome& outcome : by_hand.receive(tensor))
      EXPECT_TRUE(outcome.ok()) << outcome.what();
  }
  {
    ByHand by_hand;
    by_hand.add(tensor, kSharedNumber + 9, {0, 1, 2, 3});  // other tags' may be received later
    by_hand.add(tensor, kSharedNumber + 2, {0, 1, 2, 3});
    for (const Outcome& outcome : by_hand.receive(tensor))
      EXPECT_TRUE(outcome.ok()) << outcome.what();
  }
  struct Case {
    uint32_t first, second;
    std::vector<size_t> first_frames, second_frames;
    size_t fails;
    const char* part;
  };
  const std::vector<Case> cases = {
      {1, 1, {0, 1, 2, 3}, {0, 1, 2, 3}, 1, "sequence: expected 2, got 1"},  // a message twice
      {2, 3, {0, 1, 2, 3}, {0, 1, 2, 3}, 0, "sequence: expected 1, got 2"},  // one that is missing
      {1, 2, {0, 1, 1, 2, 3}, {0, 1, 2}, 0, "first: expected"},              // a frame twice
      {1, 2, {0, 2, 3}, {0, 1, 2, 3}, 0, "first: expected"},                 // one that is missing
      // Of a tag that is not counted by itself: one that came before, and a sender who changes his mind.
      {kSharedNumber + 4, kSharedNumber + 4, {0, 1, 2, 3}, {0, 1, 2, 3}, 1, "not come before, got 2147483652 again"},
      {1, kSharedNumber + 1, {0, 1, 2, 3}, {0, 1, 2, 3}, 1, "sequence: expected 2, got 2147483649"},
  };
  for (const Case& c : cases) {
    ByHand by_hand;
    ASSERT_EQ(tensor.plan(by_hand.engine).frames.size(), 4u);
    by_hand.add(tensor, c.first, c.first_frames);
    by_hand.add(tensor, c.second, c.second_frames);
    const auto outcomes = by_hand.receive(tensor);
    EXPECT_EQ(outcomes[0].ok(), c.fails == 1) << c.part;
    EXPECT_TRUE(outcomes[c.fails].is<PeerError>());
    EXPECT_TRUE(holds(outcomes[c.fails].what(), {"between rank 1 and rank 0", c.part}));
  }
}

// Both ranks get both values, nothing of the message is taken, and their next messages go through. Other dtypes and
// elements of one frame are tests/python/p2p/test_p2p_faults.py's.
TEST(P2pFault, TensorsThatDifferAreToldWithBothValuesAndTheGroupGoesOn) {
  Ranks one(1);
  const uint64_t frame = Tensor::random(kElements, 1).plan(one.engine(0)).frames[0].elements;
  struct Case {
    Tensor sent, expected;
    std::string part;
  };
  const auto elements = [](uint64_t sent, uint64_t expected) {
    return "elements differs: rank 0 has '" + std::to_string(sent) + "', rank 1 has '" + std::to_string(expected) + "'";
  };
  const auto codec = [](const std::string& sent, const std::string& expected) {
    return "codec differs: rank 0 has '" + sent + "', rank 1 has '" + expected + "'";
  };
  const std::vector<Case> cases = {
      // Frame by frame the same, as far as both go.
      {Tensor::random(2 * frame, 1), Tensor::random(frame, 1), elements(2 * frame, frame)},
      {Tensor::random(frame, 1), Tensor::random(2 * frame, 1), elements(frame, 2 * frame)},
      {Tensor::random(20 * frame, 1), Tensor::random(1, 1), elements(20 * frame, 1)},
      {Tensor::random(10, 1), Tensor::random(0, 1), elements(10, 0)},
      {Tensor::random(100, 1, "sym8"), Tensor::random(100, 1, "sym4"), codec("sym8:bucket=1024", "sym4:bucket=1024")},
      {Tensor::random(100, 1, "sym4:bucket=64"), Tensor::random(100, 1, "sym4"),
       codec("sym4:bucket=64", "sym4:bucket=1024")},
      {Tensor::random(96, 1, "sym4:axis=channel,C=32"), Tensor::random(96, 1, "sym4:axis=channel,C=48"),
       codec("sym4:axis=channel,C=32", "sym4:axis=channel,C=48")},
      {Tensor::random(100, 1, "logbyte"), Tensor::random(100, 1, "log9"), codec("logbyte", "log9")},
      {Tensor::random(100, 1, "sym4:meta=bf16"), Tensor::random(100, 1, "sym4"),
       codec("sym4:bucket=1024,meta=bf16", "sym4:bucket=1024")},
  };
  for (bool sender_first : {true, false}) {
    for (const Case& c : cases) {
      SCOPED_TRACE(c.part);
      Ranks ranks(2);
      Tensor got = c.expected.empty();
      MessagePtr messages[2];
      const auto send = [&] { messages[0] = sending(ranks.engine(0), c.sent, 1, 5); };
      if (sender_first) send();
      messages[1] = receiving(ranks.engine(1), got, 0, 5);
      if (!sender_first) send();
      together(ranks, [&](int rank, Engine& engine) {
        const Outcome outcome = finish(engine, messages[rank]);
        EXPECT_TRUE(outcome.is<PeerRefusal>()) << outcome.what();
        EXPECT_TRUE(holds(outcome.what(), {rank == 0 ? "send with tag 5" : "recv with tag 5",
                                           "ranks issued different messages", c.part}));
      });
      EXPECT_TRUE(got.data == c.expected.empty().data) << "nothing is taken";
      const Tensor next = Tensor::random(3 * frame, 2);
      Tensor taken = next.empty();
      together(ranks, [&](int rank, Engine& engine) {
        expectFinish(engine, rank == 0 ? sending(engine, next, 1, 5) : receiving(engine, taken, 0, 5));
      });
      EXPECT_TRUE(taken.data == next.received());
    }
  }
}

// An announcement that is none is a fault of the peer that made it.
TEST(P2pFault, ASpoiltAnnouncementIsNamed) {
  struct Damage {
    std::string text;
    const char* part;
  };
  for (const Damage& damage :
       {Damage{"frames=3\n", "expected the fields 'flow', 'frames' and 'first tag' first"},
        Damage{"flow=lane 4\nframes=3\nfirst tag=268435520\n", "expected a flow 'tag N' or 'channel N'"},
        Damage{"flow=tag 5\nframes=x\nfirst tag=268435520\n", "expected a number in 'frames', got 'x'"}}) {
    Ranks ranks(2);
    ranks.hub().tamper([&](int from, int, Lane lane, std::span<std::byte> bytes) {
      if (lane != Lane::control || from != 1) return;
      FrameHeader header = openFrame(bytes);
      if (header.kind != FrameKind::control) return;
      ASSERT_LE(damage.text.size(), header.payload_bytes);
      sealText(bytes.data(), header, damage.text);
    });
    const Tensor sent = Tensor::random(10, 1);
    Tensor got = sent.empty();
    const auto waiting = receiving(ranks.engine(1), got, 0, 5);
    const Outcome failed = finish(ranks.engine(0), sending(ranks.engine(0), sent, 1, 5));
    EXPECT_TRUE(failed.is<PeerError>());
    EXPECT_FALSE(failed.is<PeerRefusal>());
    EXPECT_TRUE(holds(failed.what(), {"send with tag 5", "waiting for the receive of it", damage.part}));
  }
}

TEST(P2pFault, WhoNeverComesIsNamedAtTheDeadline) {
  for (bool sends : {true, false}) {
    Ranks ranks(2, [](int, GroupConfig& config) {
      config.timeout = milliseconds(150);
      config.global_ranks = {10, 11};
      config.group = "outer";
    });
    Tensor tensor = Tensor::random(kElements, 1);
    Engine& engine = ranks.engine(0);
    const auto message = sends ? sending(engine, tensor, 1, 5) : receiving(engine, tensor, 1, 5);
    const Outcome outcome = finish(engine, message);
    EXPECT_TRUE(outcome.is<PeerError>());
    const std::string waited =
        sends ? "waiting for the receive of it: timed out waiting 150 ms" : "waiting for a frame: no byte for 150 ms";
    EXPECT_TRUE(
        holds(outcome.what(), {sends ? "send with tag 5" : "recv with tag 5", "rank 0 (global 10)",
                               "rank 1 (global 11)", "sequence 1", "group outer", waited, "progress deadline 150 ms"}));
    const auto later = ranks.start(0, "all_gather", [](int, OpContext&) {}).get();
    EXPECT_TRUE(holds(later.what(), {"First cause", waited}));
  }
}

TEST(P2pFault, AKilledPeerIsNamed) {
  for (bool sends : {true, false}) {
    Ranks ranks(2);
    Tensor tensor = Tensor::random(kElements, 1);
    Engine& engine = ranks.engine(0);
    const auto message = sends ? sending(engine, tensor, 1, 5) : receiving(engine, tensor, 1, 5);
    ranks.hub().kill(1);
    const Outcome outcome = finish(engine, message);
    EXPECT_TRUE(outcome.is<PeerError>());
    EXPECT_TRUE(holds(outcome.what(), {"tag 5", "rank 1", "connection closed by peer"}));
    // To it nothing starts any more; what was under way says the first cause.
    EXPECT_TRUE(holds(test::postRecv(engine, tensor, 1, 6).outcome.what(),
                      {"recv with tag 6", "First cause", "closed by peer"}));
  }
}

// However a group ends, nobody stays in a wait, and who waits is told; afterwards nothing is posted.
TEST(P2pFault, AbortAndShutdownBreakWaits) {
  for (bool abort : {true, false}) {
    Ranks ranks(2);
    Tensor tensor = Tensor::random(kElements, 1);
    Engine& engine = ranks.engine(0);
    const auto receive = receiving(engine, tensor, 1), send = sending(engine, tensor, 1);
    std::vector<Outcome> outcomes;
    std::thread waits([&] { outcomes.push_back(finish(engine, receive)); });
    std::this_thread::sleep_for(milliseconds(30));
    if (abort) engine.abort("the user asked");
    engine.shutdown();  // returns when nobody is in a wait any more
    waits.join();
    outcomes.push_back(finish(engine, send));
    for (const Outcome& outcome : outcomes)
      EXPECT_TRUE(outcome.is<PeerError>()) << outcome.what();
    EXPECT_TRUE(holds(outcomes[0].what(), {"recv with tag 0", abort ? "the user asked" : "cancelled"}));
    EXPECT_TRUE(holds(outcomes[1].what(), {"send with tag 0", abort ? "the user asked" : "First cause"}));
  }
}

// A rank that gives the group up over a message ends its waits on others too, and its collective's peer learns why.
TEST(P2pFault, AFaultReachesCollectivesAndOtherMessages) {
  Ranks ranks(3);
  Tensor ten = Tensor::random(10, 1), into = ten.empty();
  const auto waiting = receiving(ranks.engine(1), into, 2);  // rank 2 never sends
  ranks.hub().tamper([&](int from, int, Lane lane, std::span<std::byte> bytes) {
    if (lane == Lane::bulk && from == 0) bytes[0] ^= std::byte{1};
  });
  Tensor spoilt = ten.empty();
  const auto wrong = receiving(ranks.engine(1), spoilt, 0, 5);
  const auto sent = sending(ranks.engine(0), ten, 1, 5);
  const auto from_1 = receiving(ranks.engine(2), ten, 1);  // nor rank 1
  Outcome other({}, {});
  std::thread waits([&] { other = finish(ranks.engine(1), waiting); });
  std::this_thread::sleep_for(milliseconds(30));
  const Outcome failed = finish(ranks.engine(1), wrong);
  waits.join();
  EXPECT_TRUE(holds(failed.what(), {"magic: expected"}));
  EXPECT_TRUE(holds(other.what(), {"recv with tag 0", "the group was ended", "magic: expected"}));
  EXPECT_TRUE(holds(finish(ranks.engine(2), from_1).what(), {"rank 1", "gave the group up", "magic: expected"}));
}

}  // namespace
}  // namespace lowcomm
