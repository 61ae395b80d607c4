#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"
#include "transport/tcp_ends.h"

// Tags that are closed, at the two ends of a channel.

namespace lowcomm::tcp {
namespace {

// The connection is lost at every byte of a piece, before or after the tags of one or both of its messages are closed.
// Messages of other tags are whole, behind them too.
TEST(TcpCancel, WhereverTheConnectionIsLost) {
  const Bytes one = message(40, 1), two_ = message(30, 2);
  const size_t piece = 2 * kRecordHeaderBytes + one.size() + two_.size();
  for (size_t come = 0; come <= piece; ++come) {
    for (unsigned which = 1; which < 8; ++which) {
      const bool closes_one = which & 1, closes_two = which & 2, before = which & 4;
      Two two(which);
      MessageStream &a = two.ends[0].channel, &b = two.ends[1].channel;
      std::vector<std::shared_ptr<Delivery>> sends{a.send(0, one), a.send(1, two_)}, receives;
      while (two.flights[0]->size() < kPieceHeaderBytes + piece)
        two.ends[0].connection->write();
      two.flights[0]->resize(kPieceHeaderBytes + come);
      while (!two.flights[0]->empty())
        two.ends[1].connection->read();
      if (!before) two.reset();
      if (closes_one) a.closeTag(0);
      if (closes_two) a.closeTag(1);
      if (before) two.reset();
      sends.push_back(a.send(2, two_));
      sends.push_back(a.send(3, one));
      std::array<Bytes, 4> rooms{Bytes(40), Bytes(30), Bytes(30), Bytes(40)};
      for (uint32_t i = 0; i < 4; ++i)
        receives.push_back(b.receive(i, rooms[i]));
      for (int i = 0; i < 400; ++i)
        two.step(i % 2);
      for (const size_t i : {2, 3}) {
        sends[i]->wait(1, kSoon);
        receives[i]->wait(0, kSoon);
      }
      ASSERT_EQ(rooms[2], two_);
      ASSERT_EQ(rooms[3], one);
      for (const size_t i : {0, 1}) {
        const bool is_whole = come >= (i == 0 ? kRecordHeaderBytes + one.size() : piece);  // then it has arrived
        if ((i == 0 ? closes_one : closes_two) && !is_whole) {
          EXPECT_THROW(receives[i]->wait(0, kSoon), TransportError) << come << " " << which;
        } else {
          receives[i]->wait(0, kSoon);
          ASSERT_EQ(rooms[i], i == 0 ? one : two_);
        }
      }
      for (const uint32_t tag : {0, 1}) {
        if (tag == 0 ? closes_one : closes_two) b.closeTag(tag);
      }
      two.settle();
    }
  }
}

// One is given up in the middle, and one behind it whose offer was taken and whose body has not begun.
TEST(TcpCancel, AMessageThatWasOfferedAndIsWanted) {
  Two two(3);
  MessageStream &a = two.ends[0].channel, &b = two.ends[1].channel;
  const Bytes large = message(kUnaskedBytes - 501'000, 1), offered = message(1'000'000, 2), half = message(500'000, 3),
              small = message(100, 4);
  Bytes room(large.size()), room_offered(offered.size());
  b.receive(2, room);
  b.receive(1, room_offered);
  a.send(2, large);
  const auto wanted = a.send(1, offered);
  while (b.in() < a.out().end()) {
    two.ends[0].connection->write();
    two.ends[1].connection->read();
  }
  const uint64_t end = a.out().end();
  a.send(0, half);
  while (two.flights[0]->empty())
    two.ends[0].connection->write();
  while (a.out().end() < end + half.size() + offered.size()) {
    two.ends[1].connection->write();
    two.ends[0].connection->read();
  }
  a.closeTag(0);
  a.closeTag(1);
  EXPECT_LT(a.out().end(), end + half.size());
  std::array<Bytes, 2> rooms{Bytes(100), Bytes(100)};
  const auto lost = b.receive(0, room);
  std::vector<std::shared_ptr<Delivery>> receives;
  for (uint32_t i : {0, 1}) {
    a.send(3 + i, small);
    receives.push_back(b.receive(3 + i, rooms[i]));
  }
  for (int i = 0; i < 2000; ++i)
    two.step(i % 2);
  for (uint32_t i : {0, 1}) {
    receives[i]->wait(0, kSoon);
    EXPECT_EQ(rooms[i], small);
  }
  EXPECT_THROW(lost->wait(0, kSoon), TransportError);
  EXPECT_THROW(wanted->wait(1, kSoon), TransportError);
  b.closeTag(0);
  b.closeTag(1);
  two.settle();
}

// Nothing of a message travels that was given up before a connection had promised it, and little of one that it had;
// nor of one that comes when its receiver has closed the tag.
TEST(TcpCancel, WhatIsGivenUpDoesNotTravel) {
  Two two(1);
  MessageStream &a = two.ends[0].channel, &b = two.ends[1].channel;
  const Bytes large = message(3'000'000, 1), small = message(100, 2);
  Bytes room(large.size()), room_small(small.size());
  const auto first = a.send(0, large);
  const auto received = b.receive(0, room);
  while (b.in() < 200'000) {
    two.ends[0].connection->write();
    two.ends[1].connection->read();
  }
  const auto second = a.send(1, large), third = a.send(0, large);
  a.closeTag(0);
  a.closeTag(1);
  for (const auto& send : {first, second, third})
    EXPECT_THROW(send->wait(1, kSoon), TransportError);
  b.closeTag(2);
  const auto dropped = a.send(2, large), offered = a.send(2, large);  // more than may come unasked
  const auto last = a.send(3, small);
  const auto got = b.receive(3, room_small);
  for (int i = 0; i < 3000; ++i)
    two.step(i % 2);
  EXPECT_THROW(received->wait(0, kSoon), TransportError);
  EXPECT_THROW(dropped->wait(1, kSoon), TransportError);
  EXPECT_THROW(offered->wait(1, kSoon), TransportError);
  got->wait(0, kSoon);
  last->wait(1, kSoon);
  EXPECT_EQ(room_small, small);
  EXPECT_LT(b.in(), 400'000u + large.size());
  b.closeTag(0);
  b.closeTag(1);
  a.closeTag(2);
  two.settle();
}

// Bytes that no peer of this version says: of messages that it has no numbers for, and cuts within a record.
TEST(TcpCancel, RefusesWordsAtNoTimeForThem) {
  using enum Record::Kind;
  const auto said = [](const std::vector<Record>& records) {
    MessageStream channel(1);
    const Bytes out(10);
    channel.send(0, out);
    const auto lock = channel.lock();
    for (const Record& record : records) {
      std::array<std::byte, kRecordHeaderBytes> bytes;
      write(record, bytes);
      std::memcpy(channel.room().data(), bytes.data(), bytes.size());
      channel.arrived(bytes.size());
    }
  };
  EXPECT_THROW(said({{given_up, 0, 0}}), WireError);
  EXPECT_THROW(said({{dropped, 0, 1}}), WireError);
  EXPECT_THROW(said({{dropped, 0, 0}}), WireError) << "its bytes were not received";
  EXPECT_THROW(said({{delivered, 0, 0}}), WireError);
  said({{message, 4, 0}, {message, 4, 1}, {given_up, 0, 1}});
  MessageStream channel(1);
  const auto lock = channel.lock();
  channel.cut();
  channel.arrived(3);
  EXPECT_THROW(channel.cut(), WireError);
}

// Both ends send and receive until each closes the tag, connections are lost. What was received by then is right, and
// once both have closed it the tag is as if it had never been used.
TEST(TcpCancel, ATagThatBothHaveClosedIsAsNew) {
  constexpr uint32_t kTag = 1;
  int received = 0, failed = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    Two two(seed);
    for (int round = 0; round < 5; ++round) {
      std::array<bool, 2> closed{};
      for (int at : {0, 1})
        two.ends[at].sends[kTag].clear(), two.ends[at].receives[kTag].clear(), two.sent[at][kTag].clear();
      while (!closed[0] || !closed[1]) {
        const int at = static_cast<int>(below(two.random, 2));
        const size_t what = closed[at] ? 100 : below(two.random, 60);
        if (what < 3) {
          two.send(at, kTag);
        } else if (what < 6) {
          two.receive(at, kTag);
        } else if (what < 7) {
          two.close(at, kTag);
          closed[at] = true;
        } else if (what < 8 && below(two.random, 4) == 0) {
          two.reset();
        } else {
          two.step(at);
        }
      }
      for (int i = 0; i < 20'000 && (i % 64 != 0 || !two.isQuiet()); ++i)
        two.step(i % 2);
      ASSERT_TRUE(two.isQuiet()) << "seed " << seed;
      for (int from : {0, 1}) {
        const auto& receives = two.ends[1 - from].receives[kTag];
        for (size_t i = 0; i < receives.size(); ++i) {
          (receives[i].end == Item::End::done ? received : failed) += 1;
          if (receives[i].end != Item::End::done) continue;
          const Bytes& want = two.sent[from][kTag].at(i);
          ASSERT_TRUE(std::equal(want.begin(), want.end(), receives[i].bytes->begin())) << "seed " << seed;
        }
      }
    }
  }
  EXPECT_GT(received, 300);
  EXPECT_GT(failed, 300);
}

// An end closes each use of a tag once.
TEST(TcpCancel, ATagThatIsClosedTwiceIsRefused) {
  Two two(1);
  two.close(0, 1);
  {
    const auto lock = two.ends[0].channel.lock();
    two.ends[0].channel.out().append({Record::Kind::closed, 1}, {}, 0);
  }
  std::string why;
  for (int i = 0; i < 100 && why.empty(); ++i) {
    two.ends[0].connection->write();
    try {
      two.ends[1].connection->read();
    } catch (const WireError& error) {
      why = error.what();
    }
  }
  EXPECT_EQ(why, "tag closed: expected one that is not, got 1 again");
}

}  // namespace
}  // namespace lowcomm::tcp
