#include "transport/tcp/message_stream.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "transport/tcp/pace.h"
#include "transport/tcp/socket.h"
#include "transport/transport_cases.h"

namespace lowcomm::tcp {
namespace {

constexpr size_t kMessageBytes = (1 << 20) - kMessageCost;  // four go unasked

// The two ends of a channel without a network: bytes of a stream are copied from one to the other.
class Pair {
 public:
  explicit Pair(uint64_t most_early = kUnaskedBytes) : a(1, most_early), b(0, most_early) {}

  // Until neither has more to say.
  void settle() {
    while (move(a, b, a_out_) + move(b, a, b_out_) > 0) {
    }
  }

  MessageStream a, b;

 private:
  static size_t move(MessageStream& from, MessageStream& to, uint64_t& out) {
    std::vector<std::byte> bytes;
    {
      const auto lock = from.lock();
      std::array<iovec, 16> parts;
      const size_t count = from.out().gather(out, from.out().promise(out, from.out().end() - out), parts);
      for (size_t i = 0; i < count; ++i) {
        const auto* begin = static_cast<const std::byte*>(parts[i].iov_base);
        bytes.insert(bytes.end(), begin, begin + parts[i].iov_len);
      }
      out += bytes.size();
    }
    {
      const auto lock = to.lock();
      for (size_t done = 0; done < bytes.size();) {
        const auto room = to.room();
        const size_t here = std::min(room.size(), bytes.size() - done);
        std::memcpy(room.data(), bytes.data() + done, here);
        to.arrived(here);
        done += here;
      }
    }
    const auto lock = from.lock();
    from.out().received(out);
    return bytes.size();
  }

  uint64_t a_out_ = 0, b_out_ = 0;
};

// Hundred messages that nobody receives cost their receiver the memory of four.
TEST(TcpChannel, HoldsLittleThatHasNoReceive) {
  Pair pair;
  const Bytes data = message(kMessageBytes, 1);
  std::vector<std::shared_ptr<Delivery>> sends;
  for (uint32_t i = 0; i < 100; ++i)
    sends.push_back(pair.a.send(i, data));
  pair.settle();
  const auto lock = pair.b.lock();
  EXPECT_GE(pair.b.in(), 4 * kMessageBytes);
  EXPECT_LE(pair.b.in(), kUnaskedBytes + 100 * kRecordHeaderBytes);
}

// An op ends, and maybe its process: short messages are written by then, and what a peer is told of its own. A long one
// would hold the op up.
TEST(TcpChannel, AcknowledgesWhenShortMessagesAreWritten) {
  constexpr std::chrono::hours kForEver{1};
  constexpr std::chrono::milliseconds kShortly{50};
  Pair pair;
  const Bytes data = message(1000, 1), large = message(kMessageBytes, 2);
  const auto first = pair.a.send(0, data);
  const auto begin = std::chrono::steady_clock::now();
  pair.a.acknowledge(kShortly);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, kShortly);  // it waited
  {
    const auto lock = pair.a.lock();
    pair.a.wrote(pair.a.out().end());
  }
  pair.a.acknowledge(kForEver);
  const auto second = pair.a.send(1, large);
  pair.a.acknowledge(kForEver);
}

TEST(TcpChannel, AcknowledgesWhatHasCome) {
  constexpr std::chrono::hours kForEver{1};
  Pair pair;
  const Bytes data = message(1000, 1);
  Bytes room(1000);
  pair.b.acknowledge(kForEver);  // nothing has come
  const auto receive = pair.b.receive(0, room);
  const auto send = pair.a.send(0, data);
  pair.settle();
  receive->wait(0, kLong);
  std::atomic<bool> is_written{false};
  auto acknowledged = std::async(std::launch::async, [&] {
    pair.b.acknowledge(kForEver);
    return is_written.load();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  {
    const auto lock = pair.b.lock();
    is_written = true;
    pair.b.wrote(pair.b.out().end());
  }
  EXPECT_TRUE(acknowledged.get());
  pair.b.acknowledge(kForEver);
  // Behind a message that has yet to be written it would take long: the peer's op waits for that too.
  const Bytes large = message(kMessageBytes, 2);
  const auto back = pair.b.send(1, large);
  const auto second = pair.b.receive(2, room);
  const auto again = pair.a.send(2, data);
  pair.settle();
  second->wait(0, kLong);
  pair.b.acknowledge(kForEver);
  // Nor for a channel that has failed.
  pair.b.fail(TransportError::Kind::closed, "test");
  pair.b.acknowledge(kForEver);
}

// Empty messages take memory too: so many are offered in place of being sent, and so many offers are an error.
TEST(TcpChannel, CountsMessagesThatAreEmpty) {
  constexpr size_t kMost = 1000;
  Pair pair(kMost * kMessageCost);
  std::vector<std::shared_ptr<Delivery>> sends;
  for (uint32_t i = 0; i < 2 * kMost; ++i)
    sends.push_back(pair.a.send(i % 3, {}));
  EXPECT_THROW(pair.a.send(0, {}), ValueError);
  pair.settle();
  std::vector<std::shared_ptr<Delivery>> receives;
  for (uint32_t i = 0; i < 2 * kMost; ++i)
    receives.push_back(pair.b.receive(i % 3, {}));
  pair.settle();
  for (size_t i = 0; i < sends.size(); ++i) {
    EXPECT_EQ(sends[i]->wait(1, kLong), 0u);
    EXPECT_EQ(receives[i]->wait(0, kLong), 0u);
  }
  EXPECT_NO_THROW(pair.a.send(0, {}));
}

// A peer that does not count: 14 MB of headers would keep 125 MB.
TEST(TcpChannel, RefusesMoreMessagesThanMayComeEarly) {
  for (const Record::Kind kind : {Record::Kind::message, Record::Kind::offered}) {
    for (const uint64_t most_early : {kUnaskedBytes, uint64_t{64} << 10}) {
      MessageStream channel(1, most_early);
      const auto lock = channel.lock();
      uint64_t number = 0;
      try {
        for (; number < 600'000; ++number) {
          write(Record{kind, static_cast<uint32_t>(number % 5), number, 0}, channel.room().first<kRecordHeaderBytes>());
          channel.arrived(kRecordHeaderBytes);
        }
        ADD_FAILURE() << "expected an error";
      } catch (const WireError& error) {
        EXPECT_NE(std::string(error.what()).find("without receives: expected at most"), std::string::npos);
      }
      EXPECT_LE(number, 2 * most_early / kMessageCost);
    }
  }
}

// Whatever came before its receive or was only offered, in whichever order tags are asked for.
TEST(TcpChannel, DeliversInTheOrderOfATag) {
  Pair pair;
  constexpr uint32_t kTags = 3;
  constexpr size_t kOfTag = 8;
  std::vector<Bytes> out, in;
  std::vector<std::shared_ptr<Delivery>> sends, receives;
  for (unsigned i = 0; i < kTags * kOfTag; ++i) {
    out.push_back(message(i % 5 == 4 ? 0 : kMessageBytes / 2 + i, i));
    in.emplace_back(out.back().size());
  }
  for (uint32_t i = 0; i < out.size(); ++i)
    sends.push_back(pair.a.send(i % kTags, out[i]));
  pair.settle();
  for (uint32_t tag : {2, 0, 1}) {
    for (size_t k = 0; k < kOfTag; ++k) {
      receives.push_back(pair.b.receive(tag, in[k * kTags + tag]));
      if (k % 3 == 0) pair.settle();
    }
  }
  pair.settle();
  for (const auto& delivery : receives)
    delivery->wait(0, kLong);
  for (const auto& delivery : sends)
    delivery->wait(1, kLong);
  EXPECT_EQ(in, out);
}

// A receive that is there already has the room: what was offered goes at once, and later messages need not be.
TEST(TcpChannel, AnOfferIsTakenByAReceiveThatWaits) {
  Pair pair;
  const Bytes data = message(kUnaskedBytes + 1, 3);
  Bytes room(data.size()), small(8);
  const auto received = pair.b.receive(7, room);
  pair.a.send(7, data);
  const auto next = pair.a.send(8, small);
  pair.settle();
  received->wait(0, kLong);
  EXPECT_EQ(room, data);
  const auto received_next = pair.b.receive(8, small);
  pair.settle();
  received_next->wait(0, kLong);
  next->wait(1, kLong);
}

TEST(TcpChannel, EveryMessageFailsWithIt) {
  Pair pair;
  const Bytes data = message(kUnaskedBytes - kMessageCost, 1);
  Bytes room(data.size());
  std::vector<std::shared_ptr<Delivery>> deliveries{pair.a.send(0, data), pair.a.send(0, data),
                                                    pair.b.receive(5, room)};
  pair.settle();
  deliveries.push_back(pair.b.receive(0, room));
  deliveries.push_back(pair.b.receive(0, room));
  pair.a.fail(TransportError::Kind::closed, "gone");
  pair.b.fail(TransportError::Kind::closed, "gone");
  for (const auto i : {0, 1, 2, 4})
    EXPECT_THROW(deliveries[i]->wait(0, kLong), TransportError) << i;
  deliveries[3]->wait(0, kLong);  // it had come
}

// What no sender of this version says, as records of a stream: (kind, tag, number, bytes).
TEST(TcpChannel, RefusesWhatComesAtNoTimeForIt) {
  using enum Record::Kind;
  const auto refused = [](std::vector<Record> records, bool posted = false, bool sent = true) {
    MessageStream channel(1);
    Bytes out(10), room(100);
    channel.send(0, out);
    if (posted) channel.receive(1, room);
    const auto lock = channel.lock();
    channel.out().promise(0, channel.out().end());
    if (sent) channel.out().received(channel.out().end());
    for (size_t i = 0; i < records.size(); ++i) {
      std::array<std::byte, kRecordHeaderBytes> bytes;
      write(records[i], bytes);
      std::memcpy(channel.room().data(), bytes.data(), bytes.size());
      if (i + 1 == records.size()) {
        EXPECT_THROW(channel.arrived(bytes.size()), WireError);
        return;
      }
      channel.arrived(bytes.size());
      if (records[i].hasBody() && records[i].bytes > 0) channel.arrived(records[i].bytes);
    }
  };
  refused({{delivered, 0, 1, 0}});
  refused({{delivered, 0, 0, 0}, {delivered, 0, 0, 0}});
  refused({{delivered, 0, 0, 0}}, false, /*sent=*/false);
  refused({{wanted, 0, 0, 0}});                      // it was not offered
  refused({{body, 0, 0, 10}});                       // nobody wanted it
  refused({{offered, 1, 0, 10}, {body, 0, 0, 10}});  // nor this one, yet
  refused({{offered, 1, 0, 10}, {body, 0, 0, 9}}, true);
  refused({{offered, 1, 0, 101}}, true);
  refused({{message, 1, 0, 101}}, true);
  refused({{message, 1, 1, 10}});  // the first is number 0
  refused({{message, 1, 0, kUnaskedBytes - kMessageCost}, {message, 1, 1, 0}});
}

// A pipe that reads ahead gives the same bytes in fewer calls, and those that it has before it says that there are
// none, whatever is left of its turn.
TEST(TcpPipe, ReadsAhead) {
  std::array<int, 2> ends;
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  Fd writer(ends[1]);
  Pipe pipe{Fd(ends[0])};
  pipe.readAhead();
  std::vector<std::byte> sent(3000), got(sent.size());
  for (size_t i = 0; i < sent.size(); ++i)
    sent[i] = static_cast<std::byte>(i * 7 + i / 256);
  ASSERT_EQ(::write(writer.get(), sent.data(), sent.size()), static_cast<ssize_t>(sent.size()));
  size_t at = 0, turn = 1000, asked = 0;
  for (const size_t bytes : {16, 24, 700, 24, 24, 500, 1712}) {
    for (size_t end = at + bytes; at < end;) {
      const size_t before = turn;
      const Moved moved = pipe.read(std::span(got).subspan(at, end - at), turn);
      asked += turn != before;
      if (moved.bytes == 0) turn = 1000;  // the next turn
      ASSERT_FALSE(moved.over);
      at += moved.bytes;
    }
  }
  EXPECT_EQ(got, sent);
  EXPECT_LE(asked, 6u);
  size_t none = 0;
  std::byte room;
  EXPECT_EQ(pipe.read({&room, 1}, none).bytes, 0u);
  writer = Fd();
  turn = 1;
  EXPECT_TRUE(pipe.read({&room, 1}, turn).over);
}

// Near hosts: Reno, and others wait while a slow link takes a piece. Fast links: larger pieces, in whole records of
// TLS.
TEST(TcpPace, TheMannerFollowsWhatTheKernelReports) {
  const SendPolicy unknown = mannerFor({});
  EXPECT_EQ(unknown.piece_bytes, kShortPieceBytes);
  const SendPolicy slow = mannerFor({.least_round_trip_s = 0.0002, .delivered_a_s = 12.5e6});
  EXPECT_STREQ(slow.congestion, "reno");
  EXPECT_EQ(slow.piece_bytes, kShortPieceBytes);
  const SendPolicy far = mannerFor({.least_round_trip_s = 0.04, .delivered_a_s = 6e6});
  EXPECT_STREQ(far.congestion, "bbr");
  EXPECT_LT(far.patience, slow.patience);
  EXPECT_STREQ(mannerFor({.least_round_trip_s = 0.04}, /*is_one_of_several=*/true).congestion, "cubic");
  const SendPolicy fast = mannerFor({.least_round_trip_s = 0.00005, .delivered_a_s = 1e9});
  EXPECT_EQ(fast.piece_bytes, 3 * kShortPieceBytes);
  EXPECT_EQ(mannerFor({.delivered_a_s = 1e12}).piece_bytes, kPieceBytes);
}

}  // namespace
}  // namespace lowcomm::tcp
