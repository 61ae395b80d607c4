#include "transport/memory.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "transport/transport_cases.h"

namespace lowcomm {
namespace {

struct Pair {
  MemoryHub hub{2};
  std::unique_ptr<Transport> a = hub.transport(0), b = hub.transport(1);
};

TEST(MemoryTransport, KnowsItsPlace) {
  MemoryHub hub(3);
  EXPECT_EQ(hub.transport(2)->rank(), 2);
  EXPECT_EQ(hub.transport(1)->size(), 3);
}

// In order for a (lane, peer, tag), whichever side comes first; other lanes and tags do not interfere.
TEST(MemoryTransport, KeepsOrderInEveryLaneAndTag) {
  for (bool receive_first : {true, false}) {
    Pair p;
    std::vector<Bytes> in;
    std::vector<Bytes> out;
    std::vector<std::unique_ptr<Transfer>> receives, sends;
    for (size_t i = 0; i < 12; ++i) {
      out.push_back(message(i * 100, static_cast<int>(i)));
      in.emplace_back(2000);
    }
    const auto lane = [](size_t i) { return i % 2 ? Lane::control : Lane::bulk; };
    const auto receive = [&] {
      // Backwards over lanes and tags, forwards within one.
      for (size_t i : {3, 7, 11, 2, 6, 10, 1, 5, 9, 0, 4, 8})
        receives.push_back(p.b->irecv(lane(i), 0, i % 4, in[i]));
    };
    if (receive_first) receive();
    for (size_t i = 0; i < 12; ++i)
      sends.push_back(p.a->isend(lane(i), 1, i % 4, out[i]));
    if (!receive_first) receive();
    for (auto* transfers : {&sends, &receives}) {
      for (auto& transfer : *transfers)
        transfer->wait(kLong);
    }
    for (size_t i = 0; i < 12; ++i)
      EXPECT_EQ(Bytes(in[i].begin(), in[i].begin() + out[i].size()), out[i]) << i;
  }
}

TEST(MemoryTransport, SendIsDoneWhenItsReceiveHasTheBytes) {
  Pair p;
  const Bytes out = message(10, 1);
  Bytes in(10);
  auto send = p.a->isend(Lane::bulk, 1, 0, out);
  expectFails(*send, Kind::timed_out, 1, kSoon);
  p.b->irecv(Lane::bulk, 0, 0, in)->wait(kLong);
  send->wait(kLong);
  EXPECT_EQ(in, out);
}

TEST(MemoryTransport, ReceiveMayBeLongerNeverShorter) {
  Pair p;
  const Bytes out = message(10, 1);
  Bytes in(9, std::byte{0xee});
  auto send = p.a->isend(Lane::bulk, 1, 0, out);
  auto receive = p.b->irecv(Lane::bulk, 0, 0, in);
  expectFails(*receive, Kind::closed, 0);
  EXPECT_EQ(in, Bytes(9, std::byte{0xee}));
}

TEST(MemoryTransport, CancelEndsOneLaneOnBothSides) {
  Pair p;
  auto out = std::make_unique<Bytes>(10);
  auto in = std::make_unique<Bytes>(10);
  auto mine = p.a->irecv(Lane::bulk, 1, 0, *in);
  auto mine_too = p.a->isend(Lane::bulk, 1, 5, *out);
  Bytes other(10);
  auto theirs = p.b->irecv(Lane::bulk, 0, 9, other);
  p.a->cancel(Lane::bulk);
  p.a->cancel(Lane::bulk);
  in.reset();  // no span is touched after the return: the address sanitizer watches
  out.reset();
  expectFails(*mine, Kind::cancelled, 1);
  expectFails(*mine_too, Kind::cancelled, 1);
  expectFails(*theirs, Kind::closed, 0);
  expectFails(*p.b->isend(Lane::bulk, 0, 0, other), Kind::closed, 0);
  expectFails(*p.a->isend(Lane::bulk, 1, 0, other), Kind::cancelled, 1);

  const Bytes text = message(10, 3);
  auto send = p.a->isend(Lane::control, 1, 0, text);
  p.b->irecv(Lane::control, 0, 0, other)->wait(kLong);
  send->wait(kLong);
  EXPECT_EQ(other, text);
}

// An end that closes a tag is through with it: its transfers are over, and messages that still come are dropped; when
// both have, the tag is as before. Other tags are not touched.
TEST(MemoryTransport, ATagThatBothHaveClosedIsAsNew) {
  Pair p;
  const Bytes next = message(10, 4);
  Bytes in(10), other(10);
  for (int round = 0; round < 3; ++round) {
    auto out = std::make_unique<Bytes>(10);
    auto room = std::make_unique<Bytes>(10);
    auto theirs = p.b->irecv(Lane::bulk, 0, 5, other);
    auto receive = p.a->irecv(Lane::bulk, 1, 0, *room);
    p.a->closeTag(Lane::bulk, 1, 0);
    room.reset();
    expectFails(*receive, Kind::cancelled, 1);
    auto waits = p.b->irecv(Lane::bulk, 0, 0, other);
    expectFails(*p.b->isend(Lane::bulk, 0, 0, next), Kind::cancelled, 0);
    expectFails(*waits, Kind::timed_out, 0, kSoon);
    p.b->closeTag(Lane::bulk, 0, 0);
    expectFails(*waits, Kind::cancelled, 0);
    p.a->isend(Lane::bulk, 1, 5, next)->wait(kLong);
    theirs->wait(kLong);
    auto send = p.b->isend(Lane::bulk, 0, 0, next);
    EXPECT_EQ(p.a->unclaimed(Lane::bulk, 1, 0, 64), 0u);
    EXPECT_EQ(p.a->unclaimed(Lane::bulk, 1, 1, 64), std::nullopt);
    p.a->irecv(Lane::bulk, 1, 0, in)->wait(kLong);
    send->wait(kLong);
    EXPECT_EQ(in, next);
    EXPECT_EQ(p.a->unclaimed(Lane::bulk, 1, 0, 64), std::nullopt);
  }
}

TEST(MemoryTransport, DroppedTransportClosesItsConnections) {
  Pair p;
  Bytes in(10);
  auto receive = p.b->irecv(Lane::control, 0, 0, in);
  p.a.reset();
  expectFails(*receive, Kind::closed, 0);
}

TEST(MemoryTransport, KilledRankIsGoneForItsPeersOnly) {
  MemoryHub hub(3);
  auto a = hub.transport(0), b = hub.transport(1), c = hub.transport(2);
  Bytes in(10), in_c(10);
  const Bytes out = message(10, 1);
  auto from_killed = a->irecv(Lane::bulk, 1, 0, in);
  auto from_alive = a->irecv(Lane::bulk, 2, 0, in_c);
  hub.kill(1);
  expectFails(*from_killed, Kind::closed, 1);
  auto send = c->isend(Lane::bulk, 0, 0, out);
  from_alive->wait(kLong);
  send->wait(kLong);
  EXPECT_EQ(in_c, out);
}

TEST(MemoryTransport, StalledRankDeliversNothingUntilItIsResumed) {
  Pair p;
  p.hub.stall(0);
  const Bytes first = message(10, 1), second = message(10, 2);
  Bytes in(10), in_second(10);
  auto send = p.a->isend(Lane::bulk, 1, 0, first), send_second = p.a->isend(Lane::bulk, 1, 0, second);
  auto receive = p.b->irecv(Lane::bulk, 0, 0, in), receive_second = p.b->irecv(Lane::bulk, 0, 0, in_second);
  expectFails(*receive, Kind::timed_out, 0, kSoon);
  p.hub.resume(0);
  receive->wait(kLong);
  receive_second->wait(kLong);
  send->wait(kLong);
  send_second->wait(kLong);
  EXPECT_EQ(in, first);
  EXPECT_EQ(in_second, second);
}

TEST(MemoryTransport, TamperSeesAndChangesWhatArrives) {
  Pair p;
  p.hub.tamper([](int from, int to, Lane lane, std::span<std::byte> bytes) {
    EXPECT_EQ(from, 1);
    EXPECT_EQ(to, 0);
    EXPECT_EQ(lane, Lane::bulk);
    EXPECT_EQ(bytes.size(), 10u);
    bytes[3] = std::byte{0xff};
  });
  const Bytes out = message(10, 1);
  Bytes in(20);
  auto send = p.b->isend(Lane::bulk, 0, 0, out);
  p.a->irecv(Lane::bulk, 1, 0, in)->wait(kLong);
  EXPECT_EQ(in[3], std::byte{0xff});
  EXPECT_NE(out[3], std::byte{0xff});
}

TEST(MemoryTransport, ManyRanksTalkAtOnce) {
  constexpr int kSize = 12, kRounds = 20;
  MemoryHub hub(kSize);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kSize; ++rank) {
    ranks.emplace_back([&, rank] {
      auto transport = hub.transport(rank);
      for (int round = 0; round < kRounds; ++round) {
        std::vector<Bytes> in(kSize, Bytes(300)), out(kSize);
        std::vector<std::unique_ptr<Transfer>> transfers;
        for (int peer = 0; peer < kSize; ++peer) {
          if (peer != rank) transfers.push_back(transport->irecv(Lane::bulk, peer, 0, in[peer]));
        }
        for (int peer = 0; peer < kSize; ++peer) {
          out[peer] = message(300, rank * 31 + peer * 5 + round);
          if (peer != rank) transfers.push_back(transport->isend(Lane::bulk, peer, 0, out[peer]));
        }
        for (auto& transfer : transfers)
          transfer->wait(kLong);
        for (int peer = 0; peer < kSize; ++peer) {
          if (peer != rank) EXPECT_EQ(in[peer], message(300, peer * 31 + rank * 5 + round));
        }
      }
    });
  }
  for (auto& rank : ranks)
    rank.join();
}

}  // namespace
}  // namespace lowcomm
