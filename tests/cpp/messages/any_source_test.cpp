// Receives from any rank: each gets one message, whoever sends first, next to receives that name their sender.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <map>
#include <set>
#include <thread>

#include "base/error.h"
#include "p2p_cases.h"

namespace lowcomm {
namespace {

using namespace std::chrono_literals;
using namespace test;
using test::expectFinish;

using AnyPtr = std::shared_ptr<AnyRecv>;

// Returns the sender.
int expectFinish(Engine& engine, const AnyPtr& recv) {
  std::shared_ptr<P2pRecv> message;
  const Outcome outcome(engine.runInline(recv->op, [&] { message = recv->wait(); }), {});
  EXPECT_TRUE(outcome.ok()) << outcome.what();
  if (!message) return -1;
  expectFinish(engine, MessagePtr(message));
  return message->peer;
}

// Of rank and number, so that a message tells whose it is.
Tensor numbered(int rank, uint32_t number, uint64_t elements = 1000) {
  return Tensor::random(elements, static_cast<uint32_t>(rank) * 1000 + number, "none");
}

TEST(AnySource, EveryMessageIsReceivedOnceFromWhomItIs) {
  for (int size : {2, 4}) {
    Ranks ranks(size);
    constexpr uint32_t kEach = 40;
    std::map<int, uint32_t> next;
    together(ranks, [&](int rank, Engine& engine) {
      if (rank > 0) {
        for (uint32_t k = 0; k < kEach; ++k) {
          if (rank == 2) std::this_thread::sleep_for(1ms);
          expectFinish(engine, sending(engine, numbered(rank, k), 0, 7));
        }
        return;
      }
      for (uint32_t k = 0; k < kEach * static_cast<uint32_t>(size - 1); ++k) {
        Tensor got = numbered(0, 0).empty();
        const int peer = expectFinish(engine, receivingFromAny(engine, got, 7));
        EXPECT_TRUE(got.data == numbered(peer, next[peer]++).data) << "message " << k << " from " << peer;
      }
    });
    for (int rank = 1; rank < size; ++rank)
      EXPECT_EQ(next[rank], kEach);
  }
}

TEST(AnySource, SeveralMayBeUnderWayBeforeAnybodySends) {
  Ranks ranks(3);
  std::set<int> from;
  together(ranks, [&](int rank, Engine& engine) {
    if (rank > 0) {
      std::this_thread::sleep_for(20ms);
      return expectFinish(engine, sending(engine, numbered(rank, 0), 0));
    }
    std::vector<Tensor> got(2, numbered(0, 0).empty());
    std::vector<AnyPtr> receives;
    for (Tensor& into : got)
      receives.push_back(receivingFromAny(engine, into));
    for (size_t i : {1, 0}) {
      const int peer = expectFinish(engine, receives[i]);
      from.insert(peer);
      EXPECT_TRUE(got[i].data == numbered(peer, 0).data);
    }
  });
  EXPECT_EQ(from.size(), 2u);
}

// Rank 1 offers its only message, which a receive by name takes: the offer no longer holds, and rank 2's message is
// had.
TEST(AnySource, AnOfferWhoseMessageAReceiveByNameHasHadIsLetGo) {
  Ranks ranks(3);
  for (int turn = 0; turn < 20; ++turn) {
    together(ranks, [&](int rank, Engine& engine) {
      if (rank > 0) {
        std::vector<MessagePtr> messages;
        for (uint32_t k = 0; k < (rank == 1 ? 2u : 1u); ++k)
          messages.push_back(sending(engine, numbered(rank, k), 0, 3));
        for (const MessagePtr& message : messages)
          expectFinish(engine, message);
        return;
      }
      Tensor first = numbered(0, 0).empty(), named = first, last = first;
      const AnyPtr any = receivingFromAny(engine, first, 3);
      const int peer = expectFinish(engine, any);
      // Of rank 1 one message more than of rank 2 is left, or two.
      const MessagePtr by_name = receiving(engine, named, 1, 3);
      expectFinish(engine, by_name);
      const int other = expectFinish(engine, receivingFromAny(engine, last, 3));
      EXPECT_EQ(other, peer == 1 ? 2 : 1);
      EXPECT_TRUE(last.data == numbered(other, other == 1 ? 1 : 0).data);
    });
  }
}

TEST(AnySource, TagsDoNotWaitForEachOther) {
  Ranks ranks(2);
  together(ranks, [&](int rank, Engine& engine) {
    Tensor a = numbered(1, 0), b = numbered(1, 1);
    if (rank == 1) {
      const MessagePtr second = sending(engine, b, 0, 2);
      expectFinish(engine, second);
      return expectFinish(engine, sending(engine, a, 0, 1));
    }
    Tensor got_a = a.empty(), got_b = b.empty();
    const AnyPtr first = receivingFromAny(engine, got_a, 1), second = receivingFromAny(engine, got_b, 2);
    EXPECT_EQ(expectFinish(engine, second), 1);
    EXPECT_EQ(expectFinish(engine, first), 1);
    EXPECT_TRUE(got_a.data == a.data && got_b.data == b.data);
  });
}

TEST(AnySource, NobodySendsWithinTheDeadline) {
  Ranks ranks(3, [](int, GroupConfig& config) { config.timeout = 200ms; });
  Tensor got = numbered(0, 0).empty();
  const AnyPtr recv = receivingFromAny(ranks.engine(0), got, 5);
  const Outcome outcome(ranks.engine(0).runInline(recv->op, [&] { recv->wait(); }), {});
  EXPECT_TRUE(outcome.is<PeerError>() && holds(outcome.what(), {"tag 5 from any rank", "200 ms"})) << outcome.what();
}

TEST(AnySource, AnAbortEndsTheWait) {
  Ranks ranks(2);
  Tensor got = numbered(0, 0).empty();
  const AnyPtr recv = receivingFromAny(ranks.engine(0), got);
  std::thread aborts([&] {
    std::this_thread::sleep_for(50ms);
    ranks.engine(0).abort("the test says so");
  });
  const Outcome outcome(ranks.engine(0).runInline(recv->op, [&] { recv->wait(); }), {});
  aborts.join();
  EXPECT_TRUE(outcome.is<PeerError>() && holds(outcome.what(), {"the test says so"})) << outcome.what();
}

TEST(AnySource, WordsAreParsedBack) {
  for (const AnySourceMessage& word : {AnySourceMessage{{MessageFlow::Kind::tag, 9}, {}}, AnySourceMessage{{}, 12u}}) {
    const AnySourceMessage back = AnySourceMessage::parse(word.text());
    EXPECT_EQ(back.flow, word.flow);
    EXPECT_EQ(back.offer, word.offer);
  }
  for (const char* text : {"wanted=channel 1\n", "wanted=tag\n", "offered=tag 1\n", "offered=tag 1\nannounced=x\n",
                           "wanted=tag 1\nannounced=1\n", "wanted=tag 1073741824\n"})
    EXPECT_THROW(AnySourceMessage::parse(text), WireError) << text;
}

}  // namespace
}  // namespace lowcomm
