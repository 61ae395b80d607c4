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

TEST(MemoryTransport, DroppedTransportClosesItsConnections) {
  Pair p;
  Bytes in(10);
  auto receive = p.b->irecv(Lane::control, 0, 0, in);
  p.a.reset();
  expectFails(*receive, Kind::closed, 0);
}

}  // namespace
}  // namespace lowcomm
