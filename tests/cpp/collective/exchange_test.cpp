// Faults within a conversation: data that cannot be sent, ranks that disagree, frames that are not what they
// should be. Values of whole ops are all_gather_test.cpp's and reduce_scatter_test.cpp's.
#include "collective/exchange.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "collective/collectives.h"
#include "collective/summer.h"
#include "collective_cases.h"
#include "ranks_on_threads.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using namespace test;

const float kNaN = std::numeric_limits<float>::quiet_NaN();
const float kInfinity = std::numeric_limits<float>::infinity();

// all_gather and reduce_scatter of one float tensor a rank, with what each rank says about it free to differ.
struct Says {
  std::string op = "all_gather", codec = "none";
  uint64_t n = 1000;
  DType dtype = DType::float32;
  std::vector<std::pair<uint64_t, float>> poison;  // element, value
  std::string type_name;
  std::string type_elements;
};

void converse(OpContext& op, const Says& says) {
  const int size = op.group.size();
  const Layout layout = single(says.n, says.codec);
  Bytes input = test::randomTensor(says.dtype, says.n, 1), output(input.size());
  for (const auto& [at, value] : says.poison)
    test::fromFloat(says.dtype, input.data() + at * itemBytes(says.dtype), value);
  if (says.op == "reduce_scatter") {
    reduceScatter(op, {{{layout}, says.dtype, std::vector<const void*>(size, input.data()), output.data()}}, {});
  } else {
    std::vector<Bytes> outputs(size, output);
    GatherMessage message{{layout}, says.dtype, input.data()};
    message.type_name = says.type_name;
    message.type_elements = says.type_elements;
    for (Bytes& each : outputs)
      message.outputs.push_back(each.data());
    allGather(op, {message});
  }
}

std::vector<Outcome> runSaying(Ranks& ranks, const std::function<Says(int rank)>& says) {
  std::vector<std::future<Outcome>> pending;
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const Says mine = says(rank);
    pending.push_back(ranks.start(rank, mine.op, [mine](int, OpContext& op) { converse(op, mine); }));
  }
  return ranks.finish(std::move(pending));
}

void expectWorks(Ranks& ranks) {
  for (const Outcome& outcome : runSaying(ranks, [](int) { return Says{}; }))
    EXPECT_TRUE(outcome.ok()) << outcome.what();
}

// ValueError where the value is, PeerRefusal that names it everywhere else, and the group goes on.
void expectRefused(Ranks& ranks, const Says& says, int bad_rank, uint64_t at, float value) {
  const auto outcomes = runSaying(ranks, [&](int rank) {
    Says mine = says;
    if (rank == bad_rank) mine.poison = {{at, value}};
    return mine;
  });
  const std::string element = "at element " + std::to_string(at);
  test::expectRefusedBy(bad_rank, outcomes, {element});
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (rank == bad_rank) {
      EXPECT_TRUE(holds(outcomes[rank].what(), {says.codec}));
    } else {
      EXPECT_TRUE(
          holds(outcomes[rank].what(), {says.op, "rank " + std::to_string(bad_rank) + ": ", "sequence", "group"}));
    }
  }
  expectWorks(ranks);
}

TEST(Exchange, NonFiniteValueIsNamedEverywhereAndTheGroupGoesOn) {
  for (const char* op : {"all_gather", "reduce_scatter"}) {
    for (int size : {2, 3, 5}) {
      Ranks ranks(size);
      Says says;
      says.op = op;
      says.codec = "qsgd8:bucket=64";
      for (uint64_t n : {uint64_t{100}, uint64_t{6 * 57344 + 13}}) {  // one round, and more than the window
        says.n = n;
        for (uint64_t at : {uint64_t{0}, n / 2, n - 1})
          expectRefused(ranks, says, static_cast<int>(at % size), at, at % 2 ? kNaN : kInfinity);
      }
      for (DType dtype : {DType::float16, DType::bfloat16}) {
        says.dtype = dtype;
        says.n = 5000;
        expectRefused(ranks, says, size - 1, 4999, -kInfinity);
      }
    }
  }
}

// The values that a rank keeps are checked as those that it sends are, alone in its group too; exact ones are not.
TEST(Exchange, NonFiniteValueIsRefusedWithoutPeers) {
  for (const char* op : {"all_gather", "reduce_scatter"}) {
    Says says;
    says.op = op;
    says.codec = "minmax8";
    Ranks ranks(1);
    expectRefused(ranks, says, 0, 700, kNaN);
    says.codec = "none";
    says.poison = {{700, kNaN}};
    const auto outcomes = runSaying(ranks, [&](int) { return says; });
    EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].what();
  }
}

// Elements are counted in the message, whichever segment they are in, and in a rank's own slice as in a peer's.
TEST(Exchange, NonFiniteValueOfALayoutIsCountedInTheMessage) {
  const Layout layout({{0, 1000, CodecSpec::parse("none")},
                       {1000, 700, CodecSpec::parse("minmax8:bucket=64")},
                       {1700, 200000, CodecSpec::parse("qsgd4:bucket=512")}});
  for (uint64_t at : {uint64_t{1000}, uint64_t{1699}, uint64_t{1700}, uint64_t{201699}}) {
    std::vector<float> fine(layout.elements(), 1.5f), bad = fine;
    bad[at] = kInfinity;
    const std::string element = "got inf at element " + std::to_string(at);
    Ranks ranks(2);
    const auto gathered = ranks.run("all_gather", [&](int rank, OpContext& op) {
      std::vector<std::vector<float>> outputs(2, fine);
      allGather(op,
                {{{layout}, DType::float32, (rank == 0 ? bad : fine).data(), {outputs[0].data(), outputs[1].data()}}});
    });
    test::expectRefusedBy(0, gathered, {element});
    for (int slice : {0, 1}) {
      const auto reduced = ranks.run("reduce_scatter", [&](int rank, OpContext& op) {
        std::vector<const void*> inputs(2, fine.data());
        if (rank == 0) inputs[slice] = bad.data();
        std::vector<float> own = fine;
        reduceScatter(op, {{{layout}, DType::float32, inputs, own.data()}}, {});
      });
      test::expectRefusedBy(0, reduced, {element + " of the slice for rank " + std::to_string(slice)});
    }
  }
}

TEST(Exchange, TwoRanksThatCannotSend) {
  for (uint64_t second : {uint64_t{1}, uint64_t{70000}, uint64_t{300000}}) {
    Ranks ranks(4);
    Says says;
    says.codec = "minmax8";
    says.n = 400000;
    const auto outcomes = runSaying(ranks, [&](int rank) {
      Says mine = says;
      if (rank == 0) mine.poison = {{0, kNaN}};
      if (rank == 2) mine.poison = {{second, kNaN}};
      return mine;
    });
    EXPECT_TRUE(outcomes[0].is<NonFiniteError>()) << outcomes[0].what();
    // Far into its data rank 2 may have heard of rank 0 first.
    EXPECT_TRUE(outcomes[2].is<NonFiniteError>() || outcomes[2].is<PeerRefusal>()) << outcomes[2].what();
    for (int rank : {1, 3})
      EXPECT_TRUE(outcomes[rank].is<PeerRefusal>()) << outcomes[rank].what();
    expectWorks(ranks);
  }
}

// Every rank gets a PeerRefusal with both values, from its own comparison or from an error frame of a rank that
// compared, and the group goes on: no frame of what differed is left on the lane. What else may differ is
// tests/python/collectives/test_lanes.py's.
TEST(Exchange, DifferencesAreNamedOnEveryRank) {
  struct Case {
    Says usual, odd;
    std::vector<std::string> parts;
  };
  // Bytes on the wire, whatever they are to the caller.
  const auto bytes = [](uint64_t n, const std::string& type, const std::string& elements) {
    return Says{.n = n, .dtype = DType::opaque, .type_name = type, .type_elements = elements};
  };
  const std::vector<Case> cases = {
      {{}, {.n = 500000}, {"elements a rank differs", "'1000'", "'500000'"}},  // another number of rounds
      {bytes(8, "uint16", "4"), bytes(10, "uint16", "5"), {"elements a rank differs", "'4'", "'5'"}}};
  for (const Case& c : cases) {
    for (int size : {2, 4}) {
      for (int odd : {0, size - 1}) {
        Ranks ranks(size);
        for (const Outcome& outcome : runSaying(ranks, [&](int rank) { return rank == odd ? c.odd : c.usual; })) {
          EXPECT_TRUE(outcome.is<PeerRefusal>()) << outcome.what();
          EXPECT_TRUE(holds(outcome.what(), c.parts));
          EXPECT_TRUE(holds(outcome.what(), {"rank " + std::to_string(odd) + " has", "sequence 1"}));
        }
        expectWorks(ranks);
      }
    }
  }
}

// Rank 1 of two by hand: says what rank 0 says, then `frames`, which rank 0's receives meet in order.
Outcome converseWith(const Says& says, const std::vector<std::pair<FrameKind, std::string>>& frames) {
  constexpr uint32_t kTag = kOpTags;  // the first op's
  MemoryHub hub(2);
  auto peer = hub.transport(1);
  Engine engine(hub.transport(0), {.chunk_bytes = kMinChunkBytes, .timeout = std::chrono::milliseconds(20000)});
  std::promise<Outcome> ended;
  engine.submit(
      says.op, [&](OpContext& op) { converse(op, says); },
      [&](std::exception_ptr error, const OpCounters& counters) { ended.set_value(Outcome(error, counters)); });

  std::vector<Bytes> buffers(2 * (frames.size() + 1), Bytes(frameCapacity(kMinChunkBytes)));
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (size_t i = 0; i <= frames.size(); ++i)
    transfers.push_back(peer->irecv(Lane::bulk, 0, kTag, buffers[i]));
  const auto say = [&](size_t i, FrameKind kind, std::span<const std::byte> text) {
    FrameHeader header;
    header.kind = kind;
    header.sequence = 1;
    header.payload_bytes = static_cast<uint32_t>(text.size());
    Bytes& frame = buffers[frames.size() + 1 + i];
    frame.resize(kFrameHeaderBytes + text.size());
    std::copy(text.begin(), text.end(), frame.begin() + kFrameHeaderBytes);
    sealFrame(frame, header);
    transfers.push_back(peer->isend(Lane::bulk, 0, kTag, frame));
  };
  transfers[0]->wait(std::chrono::milliseconds(5000));
  say(0, FrameKind::control, framePayload(buffers[0], openFrame(buffers[0])));
  for (size_t i = 0; i < frames.size(); ++i)
    say(i + 1, frames[i].first, std::as_bytes(std::span(frames[i].second)));
  Outcome outcome = ended.get_future().get();
  peer->cancel(Lane::bulk);
  return outcome;
}

// A bit that belongs to no element is 0 in a message that is exact throughout too.
TEST(Exchange, PaddingThatIsNotZeroIsAFault) {
  for (const char* op : {"all_gather", "reduce_scatter"}) {
    for (const char* codec : {"none", "minmax8:bucket=64"}) {
      Says says;
      says.op = op;
      says.codec = codec;
      says.n = 10;
      Ranks ranks(2);
      ranks.hub().tamper([](int from, int, Lane lane, std::span<std::byte> bytes) {
        if (lane != Lane::bulk || from != 1) return;
        const FrameHeader header = openFrame(bytes);
        if (header.kind != FrameKind::data) return;
        bytes[kFrameHeaderBytes + 50] = std::byte{1};
        sealFrame(bytes, header);
      });
      const auto outcomes = runSaying(ranks, [&](int) { return says; });
      EXPECT_TRUE(outcomes[0].is<PeerError>()) << op << " " << codec;
      EXPECT_TRUE(holds(outcomes[0].what(), {"between rank 0 and rank 1", "padding: expected 0, got 1"}));
    }
  }
}

// The kind of a frame decides, not its text: a reason may be empty.
TEST(Exchange, ErrorFramesWithoutAReasonAreRefusals) {
  for (const char* op : {"all_gather", "reduce_scatter"}) {
    for (const char* codec : {"none", "minmax8"}) {
      for (const char* reason : {"", "rank 1: out of paper"}) {
        Says says;
        says.op = op;
        says.codec = codec;
        const Outcome outcome = converseWith(says, {{FrameKind::error, reason}});
        EXPECT_TRUE(outcome.is<PeerRefusal>()) << op << " " << codec << ": " << outcome.what();
        EXPECT_TRUE(holds(outcome.what(), {"rank 1 could not send its part", *reason ? reason : "it gave no reason"}));
      }
    }
  }
}

TEST(Exchange, AnotherNumberOfOpsIsNamed) {
  Ranks ranks(2);
  std::vector<std::future<Outcome>> pending;
  pending.push_back(ranks.start(0, "noop", [](int, OpContext&) {}));
  for (int rank : {0, 1})
    pending.push_back(ranks.start(rank, "all_gather", [](int, OpContext& op) { converse(op, Says{}); }));
  const auto outcomes = ranks.finish(std::move(pending));
  EXPECT_TRUE(outcomes[0].ok());
  // Either finds it out; who does so first tells the other.
  for (const int i : {1, 2}) {
    const std::string& what = outcomes[i].what();
    EXPECT_TRUE(holds(what, {"sequence: expected 2, got 1"}) || holds(what, {"sequence: expected 1, got 2"})) << what;
  }
}

TEST(Exchange, FramesOfAnotherEpochAreFencedOff) {
  Ranks ranks(3, [](int rank, GroupConfig& config) { config.epoch = rank == 2 ? 4 : 5; });
  const auto outcomes = runSaying(ranks, [](int) { return Says{}; });
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_TRUE(holds(outcomes[rank].what(), {"epoch", "expected", "4", "5"})) << rank;
}

}  // namespace
}  // namespace lowcomm
