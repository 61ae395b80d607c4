// Messages between two ranks that either gives up: it ends on both, the flow's next one meets the next receive.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/groups.h"
#include "forwarding_transport.h"
#include "p2p_cases.h"

namespace lowcomm {
namespace {

using namespace test;

using Clock = std::chrono::steady_clock;

bool isGivenUp(const Outcome& outcome, int by, const std::string& why) {
  EXPECT_TRUE(outcome.is<PeerRefusal>()) << outcome.what();
  return bool(holds(outcome.what(), {" was given up by rank " + std::to_string(by) + ": " + why}));
}

enum class Over { memory, tcp, tls };

class CancelMessage : public testing::TestWithParam<Over> {
 protected:
  static Group groupOf(int size, const std::string& rate = "") {
    return {size, GetParam() != Over::memory, GetParam() == Over::tls ? std::optional(aSecret()) : std::nullopt, rate};
  }

  // A message that must be right.
  static void expectNext(Group& group, uint32_t tag, const std::string& codec = "none") {
    const Tensor next = Tensor::random(3000, 99, codec);
    Tensor got = next.empty();
    const MessagePtr received = receiving(group.engine(1), got, 0, tag);
    const MessagePtr sent = sending(group.engine(0), next, 1, tag);
    expectFinish(group.engine(1), received);
    expectFinish(group.engine(0), sent);
    EXPECT_TRUE(got.data == next.received());
  }
};

INSTANTIATE_TEST_SUITE_P(Engine, CancelMessage,
                         testing::ValuesIn(tcp::tlsLibrary().empty() ? std::vector{Over::memory, Over::tcp}
                                                                     : std::vector{Over::memory, Over::tcp, Over::tls}),
                         [](const auto& info) {
                           return std::string(std::array{"Memory", "Tcp", "Secret"}[static_cast<size_t>(info.param)]);
                         });

// Before the other end is posted, by sender and receiver; it fails as soon as it is.
TEST_P(CancelMessage, BeforeTheOtherEndIsThere) {
  for (const std::string codec : {"none", "sym4:bucket=1024"}) {
    Group group = groupOf(2);
    const Tensor tensor = Tensor::random(100'000, 1, codec);
    for (int round = 0; round < 3; ++round) {
      for (const bool by_sender : {true, false}) {
        Tensor got = tensor.empty();
        const int by = by_sender ? 0 : 1;
        const auto post = [&](int rank) {
          return rank == 0 ? sending(group.engine(0), tensor, 1, 7) : receiving(group.engine(1), got, 0, 7);
        };
        const MessagePtr first = post(by);
        EXPECT_TRUE(group.engine(by).cancel(first, "not now"));
        EXPECT_FALSE(group.engine(by).cancel(first, "once more"));
        EXPECT_TRUE(isGivenUp(finish(group.engine(by), first), by, "not now"));
        const MessagePtr second = post(1 - by);
        EXPECT_TRUE(isGivenUp(finish(group.engine(1 - by), second), by, "not now"));
        EXPECT_TRUE(got.data == tensor.empty().data) << "nothing of it was taken";
        expectNext(group, 7, codec);
      }
    }
  }
}

// One of three that wait for their receives, or for their sends.
TEST_P(CancelMessage, TheOneInTheMiddle) {
  Group group = groupOf(2);
  for (const bool by_sender : {true, false}) {
    std::array<Tensor, 3> tensors{Tensor::random(60'000, 1), Tensor::random(60'000, 2), Tensor::random(60'000, 3)};
    std::array<Tensor, 3> got{tensors[0].empty(), tensors[1].empty(), tensors[2].empty()};
    std::array<std::vector<MessagePtr>, 2> messages;
    const auto post = [&](int rank) {
      for (size_t i = 0; i < 3; ++i)
        messages[rank].push_back(rank == 0 ? sending(group.engine(0), tensors[i], 1)
                                           : receiving(group.engine(1), got[i], 0));
    };
    const int by = by_sender ? 0 : 1;
    post(by);
    EXPECT_TRUE(group.engine(by).cancel(messages[by][1], "this one"));
    post(1 - by);
    for (const int rank : {1, 0}) {
      for (const size_t i : {2, 0, 1}) {
        const Outcome outcome = finish(group.engine(rank), messages[rank][i]);
        EXPECT_TRUE(i == 1 ? isGivenUp(outcome, by, "this one") : outcome.ok()) << outcome.what();
        if (rank == 1 && i != 1) EXPECT_TRUE(got[i].data == tensors[i].received());
      }
    }
    for (const int rank : {0, 1})
      EXPECT_FALSE(group.engine(rank).cancel(messages[rank][2], "it is through"));
    expectNext(group, 0);
  }
}

// 40 MB on 20 Mbit/s would take 16 s. Whoever gives them up, both are through with them at once, those that wait for
// them included, and what comes next does not wait behind them.
TEST_P(CancelMessage, InTheMiddleOfASlowLink) {
  if (GetParam() == Over::memory) GTEST_SKIP() << "memory has no rate";
  Group group = groupOf(2, "20mbit");
  constexpr std::chrono::seconds kLess{15};  // than they would take
  const Tensor large = Tensor::random(10'000'000, 1, "none");
  for (const bool by_sender : {true, false}) {
    const int by = by_sender ? 0 : 1;
    Tensor got = large.empty();
    std::array<MessagePtr, 2> ends;
    const auto begun = Clock::now();
    ends[1] = receiving(group.engine(1), got, 0, 3);
    ends[0] = sending(group.engine(0), large, 1, 3);
    std::array<Clock::time_point, 2> ended;
    std::vector<std::thread> threads;
    for (const int rank : {0, 1})
      threads.emplace_back([&, rank] {
        const Outcome outcome = finish(group.engine(rank), ends[rank]);
        ended[rank] = Clock::now();
        EXPECT_TRUE(isGivenUp(outcome, by, "too long"));
      });
    std::this_thread::sleep_for(milliseconds(200));
    const auto cancelled = Clock::now();
    EXPECT_TRUE(group.engine(by).cancel(ends[by], "too long"));
    for (std::thread& thread : threads)
      thread.join();
    for (const int rank : {0, 1}) {
      const double ms = std::chrono::duration<double, std::milli>(ended[rank] - cancelled).count();
      RecordProperty((by_sender ? "send" : "receive") + std::string(rank == by ? "_here_ms" : "_there_ms"),
                     std::to_string(ms));
      EXPECT_LT(ended[rank] - begun, kLess);
    }
    expectNext(group, 3);
    EXPECT_LT(Clock::now() - begun, kLess);
  }
}

// A receive from any rank, before a sender is known and afterwards.
TEST_P(CancelMessage, AReceiveFromAnyRank) {
  Group group = groupOf(3);
  const Tensor tensor = Tensor::random(5000, 1, "none");
  Tensor got = tensor.empty();
  Engine& engine = group.engine(0);
  const auto receiveAny = [&] { return receivingFromAny(engine, got, 5); };
  const auto wait = [&](const std::shared_ptr<AnyRecv>& recv, std::shared_ptr<P2pRecv>& message) {
    return Outcome(engine.runInline(recv->op, [&] { message = recv->wait(); }), {});
  };
  std::shared_ptr<P2pRecv> message;
  const auto early = receiveAny();
  EXPECT_TRUE(engine.cancel(early, "nobody came"));
  EXPECT_FALSE(engine.cancel(early, "once more"));
  EXPECT_TRUE(isGivenUp(wait(early, message), 0, "nobody came"));
  const MessagePtr sent = sending(group.engine(2), tensor, 0, 5);
  const auto second = receiveAny();
  EXPECT_TRUE(wait(second, message).ok());
  expectFinish(engine, message);
  expectFinish(group.engine(2), sent);
  EXPECT_EQ(message->peer, 2);
  EXPECT_TRUE(got.data == tensor.data);
  EXPECT_FALSE(engine.cancel(second, "it is through"));
  const MessagePtr lost = sending(group.engine(1), tensor, 0, 5);
  EXPECT_TRUE(group.engine(1).cancel(lost, "never mind"));
  const auto third = receiveAny();
  EXPECT_TRUE(wait(third, message).ok()) << "there was a message, which its sender has given up";
  EXPECT_TRUE(isGivenUp(finish(engine, message), 1, "never mind"));
  EXPECT_TRUE(isGivenUp(finish(group.engine(1), lost), 1, "never mind"));
}

// Who gives a message up may leave at once: the other end hears why.
TEST_P(CancelMessage, AndLeaves) {
  if (GetParam() == Over::memory) GTEST_SKIP() << "in memory it is through at once";
  for (int round = 0; round < 10; ++round) {
    const int by = round % 2;
    Group group = groupOf(2, "20mbit");
    const Tensor tensor = Tensor::random(1'000'000, 1, "none");
    Tensor got = tensor.empty();
    std::array<MessagePtr, 2> ends;
    ends[1] = receiving(group.engine(1), got, 0);
    expectNext(group, 9);  // so that the sender has heard what was announced before
    ends[0] = sending(group.engine(0), tensor, 1);
    std::optional<Outcome> there;
    std::thread waits([&] { there.emplace(finish(group.engine(1 - by), ends[1 - by])); });
    EXPECT_TRUE(group.engine(by).cancel(ends[by], "farewell"));
    group.engine(by).shutdown();
    waits.join();
    EXPECT_TRUE(isGivenUp(*there, by, "farewell"));
  }
}

// Both ranks send each other messages of many tags, of which some have numbers in common, and give up some of either
// kind at random moments, while connections are cut. A message then fails because it was given up, or is right; one
// that nobody gave up is right on both ranks. Nothing is kept of those that were.
TEST_P(CancelMessage, AtRandomMomentsEveryOtherMessageIsRight) {
  const int kRounds = GetParam() == Over::tls ? 60 : 200;
  constexpr int kMessages = 10;
  Group group = groupOf(2);
  std::atomic<bool> over{false};
  std::thread cutter([&] {
    std::mt19937 random(7);
    while (!over) {
      std::this_thread::sleep_for(milliseconds(GetParam() == Over::tls ? 40 : 15));
      if (group.sockets) group.sockets->endpoints[random() % 2]->cut();
    }
  });
  struct Message {
    uint32_t tag;
    Tensor tensor;
  };
  std::mt19937 random(3);
  int given_up = 0, through = 0;
  size_t in_use = 0;
  for (int round = 0; round < kRounds && !testing::Test::HasFailure(); ++round) {
    std::array<std::vector<Message>, 2> of;  // by sender
    for (auto& messages : of) {
      for (int i = 0; i < kMessages; ++i)
        messages.push_back({i % 2 ? i % 3 : 10'000 + static_cast<uint32_t>(random() % 5000),
                            Tensor::random(random() % 30'000, random(), i % 4 < 2 ? "none" : "sym4:bucket=1024")});
    }
    std::array<std::vector<bool>, 2> cancelled, right;       // by rank; its receives
    std::array<std::vector<std::string>, 2> sent, received;  // "": it is through
    std::array<unsigned, 2> seeds{static_cast<unsigned>(random()), static_cast<unsigned>(random())};
    sideBySide(2, [&](int rank) {
      std::mt19937 draws(seeds[rank]);
      Engine& engine = group.engine(rank);
      const int peer = 1 - rank;
      std::vector<Tensor> got;
      for (const Message& message : of[peer])
        got.push_back(message.tensor.empty());
      std::vector<MessagePtr> sends(kMessages), receives(kMessages);
      const bool sends_first = draws() % 2;
      for (const bool send : {sends_first, !sends_first}) {
        for (int i = 0; i < kMessages; ++i) {
          if (send) {
            sends[i] = sending(engine, of[rank][i].tensor, peer, of[rank][i].tag);
          } else {
            receives[i] = receiving(engine, got[i], peer, of[peer][i].tag);
          }
        }
      }
      std::this_thread::sleep_for(std::chrono::microseconds(draws() % 1500));
      for (const auto& messages : {sends, receives}) {
        for (const MessagePtr& message : messages)
          cancelled[rank].push_back(draws() % 4 == 0 && engine.cancel(message, "at random"));
      }
      for (int i = 0; i < kMessages; ++i) {
        const Outcome in = finish(engine, receives[i]), out = finish(engine, sends[i]);
        received[rank].push_back(in.ok() ? "" : in.what());
        sent[rank].push_back(out.ok() ? "" : out.what());
        right[rank].push_back(got[i].data == of[peer][i].tensor.received());
      }
    });
    for (const int from : {0, 1}) {
      const int to = 1 - from;
      for (int i = 0; i < kMessages; ++i) {
        // Messages of a tag are paired in order: those of another may have been given up in its place.
        const bool anybody = cancelled[from][i] || cancelled[to][kMessages + i];
        for (const std::string& error : {sent[from][i], received[to][i]}) {
          if (error.empty()) continue;
          EXPECT_TRUE(anybody) << error;
          EXPECT_TRUE(holds(error, {" was given up by rank ", ": at random"}));
        }
        if (received[to][i].empty()) {
          EXPECT_TRUE(right[to][i]) << "round " << round;
        }
        ++(sent[from][i].empty() && received[to][i].empty() ? through : given_up);
      }
    }
    if (round == kRounds / 2) in_use = ::mallinfo2().uordblks;
  }
  over = true;
  cutter.join();
  EXPECT_GT(given_up,
            kRounds * kMessages / (GetParam() == Over::memory ? 200 : 20));  // in memory most are through at once
  EXPECT_GT(through, kRounds * kMessages / 2);
  EXPECT_LT(::mallinfo2().uordblks, in_use + (1u << 20));
  expectNext(group, 1);
}

// A transport that takes its time to begin a send and to close a tag, and notes both.
class SlowToClose final : public test::ForwardingTransport {
 public:
  using ForwardingTransport::ForwardingTransport;
  std::unique_ptr<Transfer> isend(Lane lane, int peer, uint32_t tag, std::span<const std::byte> data) override {
    if (lane == Lane::bulk) {
      sending = true;
      std::this_thread::sleep_for(milliseconds(5));
    }
    return ForwardingTransport::isend(lane, peer, tag, data);
  }
  void closeTag(Lane lane, int peer, uint32_t tag) override {
    std::this_thread::sleep_for(milliseconds(20));
    ForwardingTransport::closeTag(lane, peer, tag);
    closed = true;
  }

  std::atomic<bool> sending{false}, closed{false};
};

// The transport may read a send's frames until its tag is closed, so who waits for the send keeps them until then: also
// one who is told of the receive and of the end at the same moment.
TEST(CancelMessageFrames, StayUntilTheTagIsClosed) {
  int given_up = 0;
  for (int round = 0; round < 30; ++round) {
    MemoryHub hub(2);
    SlowToClose* transport = nullptr;
    test::Ranks ranks(2, nullptr, [&](int rank) {
      auto slow = std::make_unique<SlowToClose>(hub.transport(rank));
      if (rank == 0) transport = slow.get();
      return slow;
    });
    const Tensor tensor = Tensor::random(5'000, 1, "none");
    Tensor got = tensor.empty();
    const MessagePtr sent = sending(ranks.engine(0), tensor, 1, 3);
    std::thread waits([&] {
      const Outcome outcome = finish(ranks.engine(0), sent);
      if (outcome.ok()) return;  // all frames had left
      EXPECT_TRUE(transport->closed);
      EXPECT_TRUE(isGivenUp(outcome, 0, "no more")) << outcome.what();
      ++given_up;
    });
    std::thread receives([&] { finish(ranks.engine(1), receiving(ranks.engine(1), got, 0, 3)); });
    while (!transport->sending)
      std::this_thread::yield();
    ranks.engine(0).cancel(sent, "no more");
    waits.join();
    receives.join();
  }
  EXPECT_GT(given_up, 0);
}

}  // namespace
}  // namespace lowcomm
