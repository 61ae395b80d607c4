#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "transport/tcp_ranks.h"

// Messages that are cancelled between ranks, over sockets, on links that are full or cut.

namespace lowcomm {
namespace {

using Clock = std::chrono::steady_clock;

double msSince(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

// With and without a secret: nothing else may differ.
class TcpCancelRanks : public testing::TestWithParam<bool> {
 protected:
  std::optional<tcp::Secret> secret() const { return GetParam() ? std::optional(aSecret()) : std::nullopt; }
};

INSTANTIATE_TEST_SUITE_P(Tcp, TcpCancelRanks,
                         testing::ValuesIn(tcp::tlsLibrary().empty() ? std::vector{false} : std::vector{false, true}),
                         [](const auto& info) { return std::string(info.param ? "Secret" : "Plain"); });

// At 20 Mbit/s 6 MB take 2.4 s. Whoever cancels, both know at once, and the tag's next message goes before all that was
// cancelled would have.
TEST_P(TcpCancelRanks, OnAFullLinkBothKnowAtOnce) {
  Ranks ranks(2, 1, secret(), "20mbit");
  const Bytes ahead = message(200'000, 1), next = message(1000, 3);
  for (const bool by_sender : {true, false}) {
    auto out = std::make_unique<Bytes>(message(6'000'000, 2)), in = std::make_unique<Bytes>(out->size());
    Bytes in_ahead(ahead.size()), in_next(next.size());
    const auto begin = Clock::now();
    const auto received_ahead = ranks[1].irecv(Lane::bulk, 0, 1, in_ahead);
    const auto received = ranks[1].irecv(Lane::bulk, 0, 2, *in);
    const auto sent_ahead = ranks[0].isend(Lane::bulk, 1, 1, ahead);
    const auto sent = ranks[0].isend(Lane::bulk, 1, 2, *out);
    sent_ahead->wait(kLong);
    std::this_thread::sleep_for(milliseconds(100));
    const auto cancelled = Clock::now();
    ranks[by_sender ? 0 : 1].cancelMessages(Lane::bulk, by_sender ? 1 : 0, 2);
    const double here = msSince(cancelled);
    (by_sender ? out : in).reset();
    expectFails(by_sender ? *sent : *received, Kind::cancelled, by_sender ? 1 : 0, milliseconds(1));
    expectFails(by_sender ? *received : *sent, Kind::cancelled, by_sender ? 0 : 1);
    const double there = msSince(cancelled);
    (by_sender ? in : out).reset();
    const auto received_next = ranks[1].irecv(Lane::bulk, 0, 2, in_next);
    const auto sent_next = ranks[0].isend(Lane::bulk, 1, 2, next);
    received_next->wait(kLong);
    sent_next->wait(kLong);
    received_ahead->wait(kLong);
    EXPECT_EQ(in_next, next);
    EXPECT_EQ(in_ahead, ahead);
    RecordProperty(by_sender ? "send_here_ms" : "receive_here_ms", std::to_string(here));
    RecordProperty(by_sender ? "send_there_ms" : "receive_there_ms", std::to_string(there));
    EXPECT_LT(here, 50);  // of a machine that does more than this test
    EXPECT_LT(there, 300);
    EXPECT_LT(msSince(begin), 1500);
  }
}

// Before its message comes, and after it has been delivered.
TEST_P(TcpCancelRanks, BeforeAndAfterATransfer) {
  Ranks ranks(3, 2, secret());
  const Bytes out = message(300'000, 1), next = message(70'000, 2);
  const Bytes large = message(tcp::kUnaskedBytes + 1, 3);  // so that it does not arrive before its receive is there
  Bytes in_large(large.size());
  Bytes in(out.size()), in_next(next.size());
  for (const Lane lane : {Lane::bulk, Lane::control}) {
    ranks[1].cancelMessages(lane, 0, 5);
    auto received = ranks[1].irecv(lane, 0, 5, in);
    ranks[1].cancelMessages(lane, 0, 5);
    expectFails(*received, Kind::cancelled, 0);
    auto sent = ranks[0].isend(lane, 1, 5, out);
    expectFails(*sent, Kind::cancelled, 1);
    sent = ranks[0].isend(lane, 1, 5, large);
    ranks[0].cancelMessages(lane, 1, 5);
    expectFails(*sent, Kind::cancelled, 1);
    received = ranks[1].irecv(lane, 0, 5, in_large);
    expectFails(*received, Kind::cancelled, 0);
    sent = ranks[0].isend(lane, 1, 5, next);
    received = ranks[1].irecv(lane, 0, 5, in_next);
    received->wait(kLong);
    sent->wait(kLong);
    ranks[0].cancelMessages(lane, 1, 5);
    ranks[1].cancelMessages(lane, 0, 5);
    sent->wait(kLong);
    EXPECT_EQ(in_next, next);
    // Another peer, and the other lane, have messages of their own.
    sent = ranks[0].isend(lane, 2, 5, out);
    ranks[0].cancelMessages(lane, 1, 5);
    ranks[0].cancelMessages(lane == Lane::bulk ? Lane::control : Lane::bulk, 2, 5);
    ranks[2].irecv(lane, 0, 5, in)->wait(kLong);
    sent->wait(kLong);
    EXPECT_EQ(in, out);
  }
}

// Both ranks send each other messages, and each cancels some, while connections are reset. Message i of a tag meets
// receive i, whoever has cancelled what.
TEST_P(TcpCancelRanks, UnderResetsTheNextMessageIsRight) {
  constexpr int kMessages = 1008, kTags = 16;
  Ranks ranks(2, 2, secret());
  std::atomic<bool> over{false};
  std::thread cutter([&] {
    std::mt19937 random(7);
    while (!over) {
      std::this_thread::sleep_for(milliseconds(GetParam() ? 40 : 15));
      ranks.endpoints[random() % 2]->cut();
    }
  });
  std::array<std::vector<char>, 2> cancelled, sent, received;  // by rank
  ranks.each([&](int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    const int peer = 1 - rank;
    for (int first = 0; first < kMessages; first += kTags) {
      std::array<std::unique_ptr<Bytes>, kTags> out, in;
      std::array<std::unique_ptr<Transfer>, kTags> sends, receives;
      const auto size = [](int i) { return 1 + (i * 7919) % 100'000; };
      for (int tag = 0; tag < kTags; ++tag) {
        const int i = first + tag;
        out[tag] = std::make_unique<Bytes>(message(size(i), static_cast<unsigned>(rank * 31 + i)));
        in[tag] = std::make_unique<Bytes>(size(i));
        receives[tag] = ranks[rank].irecv(Lane::bulk, peer, tag, *in[tag]);
        sends[tag] = ranks[rank].isend(Lane::bulk, peer, tag, *out[tag]);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
      for (int tag = 0; tag < kTags; ++tag) {
        const bool cancels = random() % 2;
        if (cancels) ranks[rank].cancelMessages(Lane::bulk, peer, tag);
        cancelled[rank].push_back(cancels);
      }
      for (int tag = 0; tag < kTags; ++tag) {
        const int i = first + tag;
        const auto ended = [&](Transfer& transfer, std::unique_ptr<Bytes>& memory) {
          try {
            transfer.wait(kLong);
            return true;
          } catch (const TransportError& error) {
            EXPECT_EQ(error.kind, Kind::cancelled) << error.what() << ", rank " << rank << ", message " << i;
            memory.reset();
            return false;
          }
        };
        sent[rank].push_back(ended(*sends[tag], out[tag]));
        received[rank].push_back(ended(*receives[tag], in[tag]));
        if (received[rank].back()) {
          ASSERT_EQ(*in[tag], message(size(i), static_cast<unsigned>(peer * 31 + i))) << i;
        }
      }
    }
  });
  over = true;
  cutter.join();
  int cancels = 0, through = 0;
  for (int rank : {0, 1}) {
    for (int i = 0; i < kMessages; ++i) {
      cancels += cancelled[rank][i];
      if (cancelled[rank][i] || cancelled[1 - rank][i]) continue;
      EXPECT_TRUE(sent[rank][i]) << i;
      EXPECT_TRUE(received[rank][i]) << i;
      ++through;
    }
  }
  EXPECT_GT(cancels, 900);
  EXPECT_GT(through, 300);
}

}  // namespace
}  // namespace lowcomm
