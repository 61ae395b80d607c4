// Messages between two ranks: orders that must not block each other, numbers, and what each fault is called.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "collective/collectives.h"
#include "p2p_cases.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

using namespace test;

TEST(P2p, CountsWhatIsSent) {
  Ranks ranks(2);
  const Tensor sent = Tensor::random(100'000, 1);
  Tensor got = sent.empty();
  OpCounters counters[2];
  together(ranks, [&](int rank, Engine& engine) {
    auto message = rank == 0 ? sending(engine, sent, 1) : receiving(engine, got, 0);
    expectFinish(engine, message);
    counters[rank] = message->op.counters;
  });
  uint64_t bytes = 0;
  for (const Frame& chunk : sent.plan(ranks.engine(0)).frames)
    bytes += kFrameHeaderBytes + chunk.payload_bytes;
  EXPECT_EQ(counters[0].raw_bytes, 400'000u);
  EXPECT_EQ(counters[0].wire_bytes, bytes);
  EXPECT_EQ(counters[1].raw_bytes, 0u);
  // The announcement.
  EXPECT_GT(counters[1].wire_bytes, kFrameHeaderBytes);
  EXPECT_LT(counters[1].wire_bytes, kFrameHeaderBytes + 100);
  EXPECT_EQ(counters[0].received_bytes, counters[1].wire_bytes);
  EXPECT_EQ(counters[1].received_bytes, bytes);
  EXPECT_GT(counters[0].encode.count(), 0);
  EXPECT_GT(counters[1].decode.count(), 0);
}

// Tags 1, 2 are sent and waited for in this order, and received as 2, 1.
TEST(P2p, TagsDoNotBlockEachOther) {
  Ranks ranks(2);
  const Tensor one = Tensor::random(200'000, 1), two = Tensor::random(300'000, 2);
  Tensor got_one = one.empty(), got_two = two.empty();
  together(ranks, [&](int rank, Engine& engine) {
    if (rank == 0) {
      const auto first = sending(engine, one, 1, 1), second = sending(engine, two, 1, 2);
      expectFinish(engine, first);
      expectFinish(engine, second);
    } else {
      expectFinish(engine, receiving(engine, got_two, 0, 2));
      expectFinish(engine, receiving(engine, got_one, 0, 1));
    }
  });
  EXPECT_TRUE(got_one.data == one.received());
  EXPECT_TRUE(got_two.data == two.received());
}

TEST(P2p, AllMaySendBeforeTheyReceive) {
  for (int size : {2, 12}) {
    Ranks ranks(size);
    const uint64_t n = size == 2 ? 1'000'000 : 50'000;
    together(ranks, [&](int rank, Engine& engine) {
      std::vector<MessagePtr> sends, receives;
      std::vector<Tensor> got;
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        sends.push_back(sending(engine, Tensor::random(n, 100 * rank + peer), peer));
      }
      for (int peer = 0; peer < size; ++peer)
        got.push_back(Tensor::random(n, 100 * peer + rank).empty());
      for (int peer = size - 1; peer >= 0; --peer) {
        if (peer != rank) receives.push_back(receiving(engine, got[peer], peer));
      }
      for (auto& message : sends)
        expectFinish(engine, message);
      for (auto& message : receives)
        expectFinish(engine, message);
      for (int peer = 0; peer < size; ++peer) {
        if (peer != rank) {
          EXPECT_TRUE(got[peer].data == Tensor::random(n, 100 * peer + rank).received()) << rank << " from " << peer;
        }
      }
    });
  }
}

// Equal tags pair in order of issue, whatever the order of the waits; other tags come in between.
TEST(P2p, ManyOutstandingKeepTheirOrder) {
  constexpr int kMany = 60;
  Ranks ranks(2);
  together(ranks, [&](int rank, Engine& engine) {
    std::vector<MessagePtr> messages;
    std::vector<Tensor> tensors;
    for (uint32_t i = 0; i < kMany; ++i)
      tensors.push_back(Tensor::random(i % 7 == 0 ? 0 : 1000 * i, i, i % 2 ? "qsgd8" : "minmax4:bucket=64"));
    std::vector<Tensor> got;
    for (const Tensor& tensor : tensors)
      got.push_back(tensor.empty());
    for (uint32_t i = 0; i < kMany; ++i)
      messages.push_back(rank == 0 ? sending(engine, tensors[i], 1, i % 3) : receiving(engine, got[i], 0, i % 3));
    for (int i = kMany - 1; i >= 0; --i)
      expectFinish(engine, messages[i]);
    if (rank == 0) return;
    for (uint32_t i = 0; i < kMany; ++i)
      EXPECT_TRUE(got[i].data == tensors[i].received()) << i;
  });
}

// Messages and a collective on the worker, at once: a rank waits for a message before it joins the other's op.
TEST(P2p, RunsBesideACollective) {
  Ranks ranks(2);
  const std::vector<float> input(50'000, 1.5f);
  const Tensor sent = Tensor::random(300'000, 1);
  Tensor got = sent.empty();
  const auto gather = [&](int, OpContext& op) {
    std::vector<std::vector<float>> outputs(2, std::vector<float>(input.size()));
    GatherMessage message{{test::single(input.size(), "none")}, DType::float32, input.data()};
    for (auto& output : outputs)
      message.outputs.push_back(output.data());
    allGather(op, {message});
    EXPECT_TRUE(outputs[0] == input && outputs[1] == input);
  };
  std::vector<std::future<test::Outcome>> pending(2);
  together(ranks, [&](int rank, Engine& engine) {
    if (rank == 0) pending[0] = ranks.start(0, "all_gather", gather);
    expectFinish(engine, rank == 0 ? sending(engine, sent, 1) : receiving(engine, got, 0));
    if (rank == 1) pending[1] = ranks.start(1, "all_gather", gather);
  });
  for (const test::Outcome& outcome : ranks.finish(std::move(pending)))
    EXPECT_TRUE(outcome.ok()) << outcome.what();
  EXPECT_TRUE(got.data == sent.received());
}

// A value that cannot be encoded fails its message on both sides with its place, wherever it is, and nothing else
// fails.
TEST(P2p, WhatCannotBeEncodedIsToldToItsReceiver) {
  Ranks ranks(2);
  const Tensor whole = Tensor::random(400'000, 1);
  const size_t frames = whole.plan(ranks.engine(0)).frames.size();
  ASSERT_GT(frames, 3u);
  const auto refused = [&](const Tensor& spoilt, const std::string& why) {
    Tensor got = spoilt.empty(), second = whole.empty();
    together(ranks, [&](int rank, Engine& engine) {
      if (rank == 0) {
        const auto message = sending(engine, spoilt, 1), good = sending(engine, whole, 1);
        const test::Outcome outcome = test::finish(engine, message);
        EXPECT_TRUE(outcome.is<ValueError>());
        EXPECT_FALSE(outcome.is<PeerError>());
        EXPECT_TRUE(holds(outcome.what(), {why}));
        EXPECT_EQ(message->op.counters.raw_bytes, 0u);
        expectFinish(engine, good);
      } else {
        const auto message = receiving(engine, got, 0), good = receiving(engine, second, 0);
        const test::Outcome outcome = test::finish(engine, message);
        EXPECT_TRUE(outcome.is<PeerRefusal>());
        EXPECT_TRUE(holds(outcome.what(), {"recv with tag 0", "could not send its part: rank 0: ", why,
                                           "recv with tag 0 failed between rank 1 and rank 0"}));
        expectFinish(engine, good);
      }
    });
    EXPECT_TRUE(second.data == whole.received());
  };
  for (uint64_t at : {0u, 200'000u, 399'999u}) {
    Tensor spoilt = whole;
    const float nan = NAN;
    std::memcpy(spoilt.data.data() + 4 * at, &nan, 4);
    refused(spoilt, "at element " + std::to_string(at));
  }
  EXPECT_THROW(planP2p(10, CodecSpec::parse("sym4"), DType::int32, kMinChunkBytes), TypeError);
  // Nobody has to ask, on either side.
  const auto ends = [&](int rank) { return ranks.engine(rank).endedWhy(); };
  EXPECT_EQ(ends(0) + ends(1), "");
}

// A frame is on its way while the next one is encoded.
TEST(P2p, SendsWhileItEncodes) {
  Ranks ranks(2);
  const Tensor sent = Tensor::random(4'000'000, 1);
  const size_t frames = sent.plan(ranks.engine(0)).frames.size();
  Tensor spoilt = sent;  // its last element would be found first by who looks at all of them before sending any
  const float nan = NAN;
  std::memcpy(spoilt.data.data() + 4 * (sent.elements - 1), &nan, 4);
  std::atomic<size_t> data{0}, errors{0};
  ranks.hub().tamper([&](int, int, Lane lane, std::span<std::byte> bytes) {
    if (lane == Lane::bulk) ++(openFrame(bytes).kind == FrameKind::data ? data : errors);
  });
  Tensor got = sent.empty();
  together(ranks, [&](int rank, Engine& engine) {
    const auto message = rank == 0 ? sending(engine, spoilt, 1) : receiving(engine, got, 0);
    EXPECT_FALSE(test::finish(engine, message).ok());
  });
  EXPECT_EQ(data, frames - 1);
  EXPECT_EQ(errors, 1u);
}

// A message whose holder drops it goes its way, and the group keeps it no longer than it must.
TEST(P2p, DroppedMessagesArrive) {
  Ranks ranks(2);
  const Tensor sent = Tensor::random(300'000, 1);
  Tensor got = sent.empty(), unread = sent.empty();
  std::weak_ptr<P2pMessage> dropped[2];
  dropped[0] = sending(ranks.engine(0), sent, 1);
  dropped[1] = receiving(ranks.engine(1), unread, 0);
  EXPECT_FALSE(dropped[0].expired());
  together(ranks, [&](int rank, Engine& engine) {
    expectFinish(engine, rank == 0 ? sending(engine, sent, 1) : receiving(engine, got, 0));
  });
  EXPECT_TRUE(got.data == sent.received());
  EXPECT_TRUE(unread.data == sent.empty().data) << "nobody asked for it";
  for (auto& message : dropped)
    EXPECT_TRUE(message.expired());
}

// Receives that are posted early, as a pipeline's are, hold their messages and no more.
TEST(P2p, APostedReceiveHoldsNoMoreThanItsMessage) {
  constexpr size_t kMany = 64, kBytes = 16 << 10;
  Ranks ranks(2);
  const Tensor sent = Tensor::random(kBytes / 4, 1, "none");
  const size_t before = ranks.engine(1).group().frames.held();
  std::vector<Tensor> got(kMany, sent.empty());
  std::vector<MessagePtr> receives;
  for (Tensor& tensor : got)
    receives.push_back(receiving(ranks.engine(1), tensor, 0));
  const size_t held = ranks.engine(1).group().frames.held() - before;
  EXPECT_GE(held, kMany * kBytes);
  EXPECT_LT(held, size_t{2} << 20);
  together(ranks, [&](int rank, Engine& engine) {
    for (size_t i = 0; i < kMany; ++i)
      expectFinish(engine, rank == 0 ? sending(engine, sent, 1) : receives[i]);
  });
  for (const Tensor& tensor : got)
    EXPECT_TRUE(tensor.data == sent.received());
}

// The buffers that a message took go back to the pool, on both sides, and the next message takes them.
TEST(P2p, BuffersAreUsedAgain) {
  Ranks ranks(2);
  const Tensor sent = Tensor::random(1'000'000, 1);
  ASSERT_GT(sent.plan(ranks.engine(0)).frames.size(), 3u);
  size_t held[2] = {};
  for (int i = 0; i < 5; ++i) {
    Tensor got = sent.empty();
    together(ranks, [&](int rank, Engine& engine) {
      BufferPool& pool = engine.group().frames;
      const size_t before = pool.held();
      const MessagePtr message = rank == 0 ? sending(engine, sent, 1) : receiving(engine, got, 0);
      EXPECT_EQ(pool.held() > before, i == 0);
      expectFinish(engine, message);
      if (i == 0) held[rank] = pool.held();
      EXPECT_EQ(pool.held(), held[rank]);
    });
  }
}

}  // namespace
}  // namespace lowcomm
