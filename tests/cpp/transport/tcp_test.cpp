#include "transport/tcp/tcp.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "transport/tcp_ranks.h"

namespace lowcomm {
namespace {

using tcp::Endpoint;

class TcpTransport : public SecretOrNot {};

INSTANTIATE_TEST_SUITE_P(Tcp, TcpTransport, secretOrNot(), secretName);

TEST_P(TcpTransport, KeepsOrderInEveryLaneAndTag) {
  Ranks ranks(2, 2, secret());
  expectOrderInEveryLaneAndTag(ranks[0], ranks[1], 30'000);
}

TEST_P(TcpTransport, ASendWaitsForItsReceive) {
  Ranks ranks(2, 2, secret());
  expectSendWaitsForItsReceive(ranks[0], ranks[1]);
}

// One that is never received does not hold up others of its connection.
TEST_P(TcpTransport, AMessageThatNobodyWantsBlocksNoOther) {
  Ranks ranks(2, 1, secret());
  const Bytes unwanted = message(9'000'000, 1);
  const auto never = ranks[0].isend(Lane::bulk, 1, 1, unwanted);
  expectArrives(ranks[0], ranks[1], message(500'000, 2), Lane::bulk, 2);
  ranks[0].cancel(Lane::bulk);
  expectFails(*never, Kind::cancelled, 1);
}

TEST_P(TcpTransport, ACancelledLaneEndsOnBothSidesAndTheOtherLives) {
  Ranks ranks(2, 2, secret());
  Bytes in(10), out = message(10, 3);
  const auto waiting = ranks[0].irecv(Lane::bulk, 1, 0, in);
  const auto theirs = ranks[1].irecv(Lane::bulk, 0, 0, in);
  ranks[0].cancel(Lane::bulk);
  expectFails(*waiting, Kind::cancelled, 1);
  expectFails(*theirs, Kind::closed, 0);
  EXPECT_THROW(ranks[0].isend(Lane::bulk, 1, 0, out), TransportError);
  EXPECT_THROW(ranks[1].isend(Lane::bulk, 0, 0, out), TransportError);
  expectArrives(ranks[0], ranks[1], out, Lane::control);
}

// All ranks exchange with all, of several sizes, while every connection is reset again and again.
void exchangeUnderCuts(int size, int rounds, const std::optional<tcp::Secret>& secret) {
  Ranks ranks(size, 2, secret);
  std::atomic<bool> over{false};
  std::atomic<int> cuts{0};
  std::thread cutter([&] {
    std::mt19937 random(7);
    while (!over) {
      std::this_thread::sleep_for(milliseconds(secret ? 50 : 15));  // TLS needs a round trip more
      ranks.endpoints[random() % size]->cut();
      ++cuts;
    }
  });
  ranks.each([&](int rank) {
    for (int round = 0; round < rounds; ++round) {
      const size_t bytes = 1 + (round * 7919) % 700'000;
      std::vector<Bytes> in(size), out(size);
      std::vector<std::unique_ptr<Transfer>> transfers;
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        const Lane lane = round % 5 ? Lane::bulk : Lane::control;
        in[peer].resize(bytes);
        out[peer] = message(bytes, static_cast<unsigned>(rank * 31 + peer * 17 + round));
        transfers.push_back(ranks[rank].irecv(lane, peer, round % 7, in[peer]));
        transfers.push_back(ranks[rank].isend(lane, peer, round % 7, out[peer]));
      }
      for (auto& transfer : transfers)
        ASSERT_NO_THROW(transfer->wait(kLong)) << "rank " << rank << ", round " << round;
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        ASSERT_EQ(in[peer], message(bytes, static_cast<unsigned>(peer * 31 + rank * 17 + round)));
      }
    }
  });
  over = true;
  cutter.join();
  EXPECT_GT(cuts, 3);
}

TEST_P(TcpTransport, LosesNothingWhereConnectionsAreReset) {
  exchangeUnderCuts(2, 120, secret());
  exchangeUnderCuts(4, 40, secret());
}

// The endpoint of rank 1 is gone at once, with all its connections, as a process that was killed.
TEST_P(TcpTransport, APeerThatIsGoneIsNamedWhicheverSideDials) {
  for (int gone : {0, 1}) {
    Ranks ranks(2, 2, secret());
    Bytes in(10);
    const auto waiting = ranks[1 - gone].irecv(Lane::bulk, gone, 0, in);
    ranks.transports[gone].reset();
    ranks.endpoints[gone].reset();
    expectFails(*waiting, Kind::closed, gone);
  }
}

tcp::Hello helloTo(const tcp::Hello& like, uint64_t incarnation) {
  tcp::Hello hello = like;
  hello.incarnation = incarnation;
  return hello;
}

tcp::Hello ask(const Endpoint& endpoint, const tcp::Hello& hello) {
  const tcp::Fd fd = dial(endpoint);
  std::array<std::byte, tcp::kHelloBytes> bytes;
  write(hello, bytes);
  EXPECT_EQ(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  EXPECT_EQ(::recv(fd.get(), bytes.data(), bytes.size(), MSG_WAITALL), static_cast<ssize_t>(bytes.size()));
  return tcp::parseHello(bytes);
}

// A process that was started again, or one that guesses, takes nobody's place.
TEST(TcpEndpoint, OthersThanThePeersAreRefused) {
  Ranks ranks(2);
  tcp::Hello real;
  const std::string group = ranks.rendezvous.get("lowcomm/tcp/group");
  std::memcpy(real.group.data(), group.data(), group.size());
  real.from = 1;
  real.channel = 1;
  real.carries = true;
  const tcp::Hello answer = ask(*ranks.endpoints[0], helloTo(real, 12345));
  EXPECT_TRUE(answer.unknown && !answer.carries) << "another incarnation";
  tcp::Hello other = helloTo(real, ranks.endpoints[1]->incarnation());
  other.group[3] ^= std::byte{1};
  EXPECT_TRUE(ask(*ranks.endpoints[0], other).unknown) << "another group";
  expectArrives(ranks[1], ranks[0], message(1000, 5));  // the connection that was there goes on
}

// Rank 1 dials while rank 0 has not read yet who that is.
TEST_P(TcpTransport, WaitsForARankThatIsLate) {
  class Late final : public Rendezvous {
   public:
    explicit Late(Rendezvous& inner) : inner_(inner) {}
    void set(const std::string& key, const std::string& value) override { inner_.set(key, value); }
    std::string get(const std::string& key, milliseconds timeout) override {
      std::this_thread::sleep_for(milliseconds(1500));
      return inner_.get(key, timeout);
    }

   private:
    Rendezvous& inner_;
  };
  MapRendezvous rendezvous;
  Late late(rendezvous);
  const auto first = std::make_shared<Endpoint>(onLoopback(secret())),
             second = std::make_shared<Endpoint>(onLoopback(secret()));
  std::unique_ptr<Transport> other;
  std::thread thread([&] { other = connectTcp(rendezvous, 1, 2, 1, kLong, second); });
  const auto one = connectTcp(late, 0, 2, 1, kLong, first);
  thread.join();
  expectArrives(*one, *other, message(100, 1), Lane::control);
}

TEST(TcpEndpoint, NamesWhoCannotBeReached) {
  MapRendezvous rendezvous;
  tcp::EndpointOptions options = onLoopback();
  options.relay = "127.0.0.1:11";  // which refuses too, and is not what the error is about
  const auto endpoint = std::make_shared<Endpoint>(options);
  rendezvous.set("lowcomm/tcp/1", "77 plain rate 127.0.0.1:9");
  try {
    connectTcp(rendezvous, 0, 2, 1, kLong, endpoint);
    ADD_FAILURE();
  } catch (const TransportError& error) {
    EXPECT_EQ(error.peer, 1);
    EXPECT_NE(std::string(error.what()).find("is gone: 127.0.0.1:9: "), std::string::npos) << error.what();
  }
}

TEST(TcpWire, RefusesWhatIsNoHelloPieceOrRecord) {
  std::array<std::byte, tcp::kHelloBytes> bytes;
  write(tcp::Hello{}, bytes);
  EXPECT_NO_THROW(tcp::parseHello(bytes));
  for (size_t i = 0; i < bytes.size(); ++i) {
    auto other = bytes;
    other[i] ^= std::byte{0x10};
    EXPECT_THROW(tcp::parseHello(other), WireError) << i;
  }
  std::array<std::byte, tcp::kPieceHeaderBytes> piece{};
  write(tcp::Piece{tcp::kPieceBytes, true, 5}, piece);
  EXPECT_EQ(tcp::parsePiece(piece).received, 5u);
  write(tcp::Piece{tcp::kPieceBytes + 1, false, 5}, piece);
  EXPECT_THROW(tcp::parsePiece(piece), WireError);
  std::array<std::byte, tcp::kRecordHeaderBytes> record{};
  write(tcp::Record{tcp::Record::Kind::message, 1, 2, tcp::kMostMessageBytes + 1}, record);
  EXPECT_THROW(tcp::parseRecord(record), WireError);
  record[0] = std::byte{7};
  EXPECT_THROW(tcp::parseRecord(record), WireError);
}

TEST(TcpAddresses, AreReadAndNamed) {
  EXPECT_EQ(tcp::hostAndPort("[::1]:80", "x"), (std::pair<std::string, std::string>("::1", "80")));
  EXPECT_EQ(tcp::hostAndPort(":29600", "x"), (std::pair<std::string, std::string>("", "29600")));
  EXPECT_EQ(tcp::joined("::1", "80"), "[::1]:80");
  for (const char* wrong : {"host", "host:", "::1:80"})
    EXPECT_THROW(tcp::hostAndPort(wrong, "x"), ValueError) << wrong;
  EXPECT_THROW(tcp::localHosts("no-such-interface"), ValueError);
}

}  // namespace
}  // namespace lowcomm
