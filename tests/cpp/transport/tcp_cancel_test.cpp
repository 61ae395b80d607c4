#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"
#include "transport/tcp_ends.h"

// Messages that are cancelled, at the two ends of a channel.

namespace lowcomm::tcp {
namespace {

// Both ends send, receive and cancel at random, words come late, connections are lost: 1,000 cancels and more.
TEST(TcpCancel, AtAnyTimeTheNextMessageMeetsTheNextReceive) {
  int cancels = 0, resets = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    Two two(seed);
    for (int i = 0; i < 1500 && !testing::Test::HasFailure(); ++i) {
      const int at = static_cast<int>(below(two.random, 2));
      const auto tag = static_cast<uint32_t>(below(two.random, kTags));
      const size_t what = below(two.random, 60);
      if (what < 2) {
        two.send(at, tag);
      } else if (what < 4) {
        two.receive(at, tag);
      } else if (what < 5) {
        two.cancel(at, tag);
        ++cancels;
      } else if (what < 6 && below(two.random, 3) == 0) {
        two.reset();
        ++resets;
      } else {
        two.step(at);
      }
    }
    two.settle();
    two.check();
    ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed;
  }
  EXPECT_GT(cancels, 1000);
  EXPECT_GT(resets, 300);
}

// The connection is lost at every byte of a piece, before or after one or both of its messages are cancelled.
TEST(TcpCancel, WhereverTheConnectionIsLost) {
  const Bytes one = message(40, 1), two_ = message(30, 2);
  const size_t piece = 2 * kRecordHeaderBytes + one.size() + two_.size();
  for (size_t come = 0; come <= piece; ++come) {
    for (unsigned which = 1; which < 8; ++which) {
      const bool cancels_one = which & 1, cancels_two = which & 2, before = which & 4;
      Two two(which);
      Channel &a = two.ends[0].channel, &b = two.ends[1].channel;
      std::vector<std::shared_ptr<Delivery>> sends{a.send(0, one), a.send(1, two_)}, receives;
      while (two.flights[0]->size() < kPieceHeaderBytes + piece)
        two.ends[0].connection->write();
      two.flights[0]->resize(kPieceHeaderBytes + come);
      while (!two.flights[0]->empty())
        two.ends[1].connection->read();
      if (!before) two.reset();
      if (cancels_one) a.cancel(0);
      if (cancels_two) a.cancel(1);
      if (before) two.reset();
      sends.push_back(a.send(0, two_));
      sends.push_back(a.send(1, one));
      std::array<Bytes, 4> rooms{Bytes(40), Bytes(30), Bytes(30), Bytes(40)};
      for (uint32_t i = 0; i < 4; ++i)
        receives.push_back(b.receive(i % 2, rooms[i]));
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
        if ((i == 0 ? cancels_one : cancels_two) && !is_whole) {
          EXPECT_THROW(receives[i]->wait(0, kSoon), TransportError) << come << " " << which;
        } else {
          receives[i]->wait(0, kSoon);
          ASSERT_EQ(rooms[i], i == 0 ? one : two_);
        }
      }
    }
  }
}

// One is cancelled in the middle, and one behind it whose offer was taken and whose body has not begun.
TEST(TcpCancel, AMessageThatWasOfferedAndIsWanted) {
  Two two(3);
  Channel &a = two.ends[0].channel, &b = two.ends[1].channel;
  const Bytes large = message(kUnaskedBytes - 500'000, 1), offered = message(1'000'000, 2), half = message(500'000, 3),
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
  a.cancel(0);
  a.cancel(1);
  EXPECT_LT(a.out().end(), end + half.size());
  std::vector<std::shared_ptr<Delivery>> receives;
  std::array<Bytes, 2> rooms{Bytes(100), Bytes(100)};
  b.receive(0, room);
  for (uint32_t tag : {0, 1}) {
    a.send(tag, small);
    receives.push_back(b.receive(tag, rooms[tag]));
  }
  for (int i = 0; i < 2000; ++i)
    two.step(i % 2);
  for (uint32_t tag : {0, 1}) {
    receives[tag]->wait(0, kSoon);
    EXPECT_EQ(rooms[tag], small);
  }
  EXPECT_THROW(wanted->wait(1, kSoon), TransportError);
}

// Nothing of a message travels that was cancelled before a connection had promised it, and little of one that it had.
TEST(TcpCancel, WhatIsCancelledDoesNotTravel) {
  Random random(1);
  Two two(1);
  Channel& a = two.ends[0].channel;
  const Bytes large = message(4'000'000, 1), small = message(100, 2);
  Bytes room(large.size());
  const auto first = a.send(0, large);
  const auto received = two.ends[1].channel.receive(0, room);
  while (two.ends[1].channel.in() < 200'000) {
    two.ends[0].connection->write();
    two.ends[1].connection->read();
  }
  const auto second = a.send(1, large), third = a.send(0, large);
  EXPECT_EQ(a.cancel(0).size(), 2u);
  EXPECT_EQ(a.cancel(1).size(), 1u);
  const auto last = a.send(0, small);
  const auto lost = two.ends[1].channel.receive(0, room), got = two.ends[1].channel.receive(0, room);
  for (int i = 0; i < 500; ++i)
    two.step(i % 2);
  EXPECT_THROW(received->wait(0, kSoon), TransportError) << "the stream alone says so, where words are lost";
  EXPECT_THROW(lost->wait(0, kSoon), TransportError);
  got->wait(0, kSoon);
  last->wait(1, kSoon);
  EXPECT_TRUE(std::equal(small.begin(), small.end(), room.begin()));
  EXPECT_LT(two.ends[1].channel.in(), 400'000u);
}

// Receives that were cancelled cost no memory when their messages come, and no sender waits for ever.
TEST(TcpCancel, AReceiveThatIsCancelledTakesItsMessage) {
  Two two(2);
  Bytes room(100);
  std::vector<std::shared_ptr<Delivery>> receives, sends;
  for (int i = 0; i < 3; ++i)
    receives.push_back(two.ends[1].channel.receive(0, room));
  EXPECT_TRUE(two.ends[1].channel.cancel(0).empty()) << "their messages have no numbers here yet";
  const Bytes large = message(3'000'000, 3), small = message(100, 4);
  for (int i = 0; i < 3; ++i)
    sends.push_back(two.ends[0].channel.send(0, large));  // the first unasked, the others offered: none would fit
  const auto last = two.ends[0].channel.send(0, small);
  const auto got = two.ends[1].channel.receive(0, room);
  for (int i = 0; i < 3000; ++i)
    two.step(i % 2);
  for (const auto& send : sends)
    EXPECT_THROW(send->wait(1, kSoon), TransportError);
  got->wait(0, kSoon);
  last->wait(1, kSoon);
  EXPECT_EQ(room, small);
}

// Bytes that no peer of this version says: of messages that it has no numbers for, and cuts within a record.
TEST(TcpCancel, RefusesWordsAtNoTimeForThem) {
  using enum Record::Kind;
  Channel channel(1);
  EXPECT_THROW(channel.hear({dropped, 0, 0}), WireError);
  channel.hear({given_up, 4, 7});
  EXPECT_THROW(channel.hear({given_up, 4, 7}), WireError);
  const auto said = [](const std::vector<Record>& records) {
    Channel channel(1);
    const Bytes out(10);
    const auto lock_after = [&] { return channel.lock(); };
    channel.send(0, out);
    channel.hear({given_up, 4, 1});
    const auto lock = lock_after();
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
  EXPECT_THROW(said({{message, 4, 0}, {message, 5, 1}}), WireError) << "another tag than was said";
  said({{message, 4, 0}, {message, 4, 1}, {given_up, 0, 1}});
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
