#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "transport/tcp_ends.h"

// A stream of messages outlives its connections, at the two ends of a channel.

namespace lowcomm::tcp {
namespace {

// The connection is lost at every byte of a piece of two messages.
TEST(TcpStreams, WhereverTheConnectionIsLost) {
  const std::array<Bytes, 2> bytes{message(40, 1), message(30, 2)};
  const size_t piece = 2 * kRecordHeaderBytes + bytes[0].size() + bytes[1].size();
  for (size_t come = 0; come <= piece; ++come) {
    Two two(static_cast<unsigned>(come));
    MessageStream &a = two.ends[0].channel, &b = two.ends[1].channel;
    const std::array sends{a.send(0, bytes[0]), a.send(1, bytes[1])};
    while (two.flights[0]->size() < kPieceHeaderBytes + piece)
      two.ends[0].connection->write();
    two.flights[0]->resize(kPieceHeaderBytes + come);
    while (!two.flights[0]->empty())
      two.ends[1].connection->read();
    two.reset();
    std::array<Bytes, 2> rooms{Bytes(40), Bytes(30)};
    const std::array receives{b.receive(0, rooms[0]), b.receive(1, rooms[1])};
    two.settle();
    for (const size_t i : {0, 1}) {
      sends[i]->wait(1, kSoon);
      receives[i]->wait(0, kSoon);
      ASSERT_EQ(rooms[i], bytes[i]) << come;
    }
  }
}

// Both ends send and receive, more than may come unasked too, and connections are lost in between.
TEST(TcpStreams, EveryMessageComesOnceAndInOrder) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    Two two(seed);
    for (int act = 0; act < 3000; ++act) {
      const int at = static_cast<int>(below(two.random, 2));
      const auto tag = static_cast<uint32_t>(below(two.random, kTags));
      const size_t what = below(two.random, 240);
      if (what < 12) {
        two.send(at, tag);
      } else if (what < 20) {
        two.receive(at, tag);
      } else if (what < 21) {
        two.reset();
      } else {
        two.step(at);
      }
    }
    for (const int from : {0, 1}) {
      for (uint32_t tag = 0; tag < kTags; ++tag) {
        auto &sends = two.ends[from].sends[tag], &receives = two.ends[1 - from].receives[tag];
        while (receives.size() < sends.size())
          two.receive(1 - from, tag);
      }
    }
    two.settle();
    for (const int from : {0, 1}) {
      for (uint32_t tag = 0; tag < kTags; ++tag) {
        const auto &sends = two.ends[from].sends[tag], &receives = two.ends[1 - from].receives[tag];
        for (size_t i = 0; i < sends.size(); ++i) {
          ASSERT_EQ(sends[i].delivery->wait(1 - from, kSoon), sends[i].bytes->size()) << seed;
          ASSERT_EQ(receives[i].delivery->wait(from, kSoon), sends[i].bytes->size()) << seed;
          ASSERT_TRUE(std::equal(sends[i].bytes->begin(), sends[i].bytes->end(), receives[i].bytes->begin())) << seed;
        }
      }
    }
  }
}

}  // namespace
}  // namespace lowcomm::tcp
