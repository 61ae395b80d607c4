#include "memory_transport.h"

#include <gtest/gtest.h>

#include <vector>

#include "transport/transport_cases.h"

namespace lowcomm {
namespace {

struct Pair {
  MemoryHub hub{2};
  std::unique_ptr<Transport> a = hub.transport(0), b = hub.transport(1);
};

TEST(MemoryTransport, KeepsOrderInEveryLaneAndTag) {
  Pair p;
  expectOrderInEveryLaneAndTag(*p.a, *p.b, 100);
}

TEST(MemoryTransport, ASendWaitsForItsReceive) {
  Pair p;
  expectSendWaitsForItsReceive(*p.a, *p.b);
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
  expectArrives(*p.a, *p.b, message(10, 3), Lane::control);
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

}  // namespace
}  // namespace lowcomm
