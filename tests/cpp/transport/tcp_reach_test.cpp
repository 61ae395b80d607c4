#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "transport/tcp/pace.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tcp.h"
#include "transport/tcp/tls.h"
#include "transport/tcp_ranks.h"
#include "transport/transport_cases.h"

// Who dials whom where not every rank can be reached.

namespace lowcomm {
namespace {

using tcp::Endpoint;
using tcp::EndpointOptions;

const EndpointOptions kDialsOnly{.dials_only = true};

struct Reach : UnlikeRanks {
  using UnlikeRanks::UnlikeRanks;

  // A message each way between two ranks; `cut`: their connections are lost while it is under way.
  void exchange(int a, int b, bool cut = false) {
    const Bytes out = message(3'000'000, 7);
    Bytes at_a(out.size()), at_b(out.size());
    std::vector<std::unique_ptr<Transfer>> transfers;
    transfers.push_back(transports[a]->irecv(Lane::bulk, b, 1, at_a));
    transfers.push_back(transports[b]->irecv(Lane::bulk, a, 1, at_b));
    transfers.push_back(transports[a]->isend(Lane::bulk, b, 1, out));
    transfers.push_back(transports[b]->isend(Lane::bulk, a, 1, out));
    if (cut) endpoints[a]->cut();
    for (auto& transfer : transfers)
      transfer->wait(kLong);
    EXPECT_EQ(at_a, out);
    EXPECT_EQ(at_b, out);
  }
};

TEST(TcpReach, WhoOnlyDialsReachesHigherAndLowerRanks) {
  Reach ranks({onLoopback(), kDialsOnly, onLoopback()});
  for (const std::string& error : ranks.errors)
    ASSERT_EQ(error, "");
  EXPECT_TRUE(ranks.endpoints[1]->addresses().empty());
  ranks.exchange(0, 1);
  ranks.exchange(1, 2);
  ranks.exchange(2, 1, /*cut=*/true);
  ranks.exchange(0, 1, /*cut=*/true);
}

TEST(TcpReach, TwoWhoOnlyDialAndHaveNoRelayAreNamed) {
  Reach ranks({kDialsOnly, kDialsOnly});
  for (const std::string& error : ranks.errors)
    EXPECT_NE(error.find("expected a relay between ranks 0 and 1"), std::string::npos) << error;
}

std::string pathOf(const Transport& transport, int peer) {
  for (const ConnectionReport& one : transport.report()) {
    if (one.peer == peer && one.lane == Lane::bulk) return one.path;
  }
  return "none";
}

// A connection that was lost has no path until it has been made again, which its exchange need not wait for.
void expectPath(const Transport& transport, int peer, const std::string& path) {
  const auto until = std::chrono::steady_clock::now() + kLong;
  std::string now = pathOf(transport, peer);
  while (now != path && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(milliseconds(5));
    now = pathOf(transport, peer);
  }
  EXPECT_EQ(now, path);
}

// Another rank passes on what they say, plain or encrypted for the two.
void expectRelayedByARank(const std::optional<tcp::Secret>& secret) {
  EndpointOptions dials_only = kDialsOnly;
  dials_only.secret = secret;
  Reach ranks({dials_only, onLoopback(secret), dials_only});
  for (const std::string& error : ranks.errors)
    ASSERT_EQ(error, "");
  ranks.exchange(0, 2);
  ranks.exchange(2, 0, /*cut=*/true);
  ranks.exchange(0, 1);
  expectPath(*ranks.transports[0], 2, "relay " + ranks.endpoints[1]->addresses()[0]);
  expectPath(*ranks.transports[2], 0, "relay " + ranks.endpoints[1]->addresses()[0]);
  expectPath(*ranks.transports[0], 1, "direct");
  EXPECT_GE(ranks.endpoints[1]->relayed().second, 2u * 2 * 3'000'000);
}

TEST(TcpReach, TwoWhoOnlyDialMeetAtARankPlain) {
  expectRelayedByARank({});
}

TEST(TcpReach, TwoWhoOnlyDialMeetAtARankEncrypted) {
  if (!tcp::tlsLibrary().empty()) expectRelayedByARank(aSecret());
}

// A relay on a port below 32768. The system gives none of those to who asks for any port, so it stays free while the
// relay is away.
std::unique_ptr<Endpoint> relayOnAPortOfItsOwn() {
  constexpr int kFirst = 20000, kPorts = 10000;
  for (int i = 0; i < kPorts; ++i) {
    const int port = kFirst + (::getpid() + i) % kPorts;
    try {
      return std::make_unique<Endpoint>(
          EndpointOptions{.listen = "127.0.0.1:" + std::to_string(port), .relays_all = true});
    } catch (const ValueError&) {
      // Somebody listens on it.
    }
  }
  throw std::runtime_error("no port is free");
}

// A relay of its own, which starts again in the middle: ranks wait, and go on.
TEST(TcpReach, ARelayThatStartsAgainCostsAPause) {
  auto relay = relayOnAPortOfItsOwn();
  const std::string address = relay->addresses()[0];
  EndpointOptions dials_only = kDialsOnly;
  dials_only.relay = address;
  Reach ranks({dials_only, dials_only});
  ASSERT_EQ(ranks.errors[0], "");
  ASSERT_EQ(ranks.errors[1], "");
  ranks.exchange(0, 1);
  expectPath(*ranks.transports[0], 1, "relay " + address);
  relay = nullptr;
  std::thread again([&] {
    std::this_thread::sleep_for(milliseconds(1500));
    try {
      relay = std::make_unique<Endpoint>(EndpointOptions{.listen = address, .relays_all = true});
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  });
  EXPECT_NO_THROW(ranks.exchange(1, 0));
  again.join();
}

TEST(TcpReach, ARelayIsForItsGroupsOnly) {
  Endpoint rank(onLoopback());
  EndpointOptions dials_only = kDialsOnly;
  dials_only.relay = rank.addresses()[0];
  MapRendezvous rendezvous;
  test::sideBySide(2, [&](int me) {
    try {
      connectTcp(rendezvous, me, 2, 1, milliseconds(800), std::make_shared<Endpoint>(dials_only));
      ADD_FAILURE() << me;
    } catch (const TransportError& error) {
      EXPECT_EQ(error.kind, Kind::timed_out) << error.what();
    }
  });
  EXPECT_EQ(rank.relayed().second, 0u);
}

// Nobody says how many connections: it depends on the round trip, but for two ranks that have BBR.
TEST(TcpReach, RanksThatAreNearHaveOneBulkConnection) {
  EXPECT_EQ(tcp::connectionsOver(4.9e-3, 4), 1);
  EXPECT_EQ(tcp::connectionsOver(5e-3, 2), tcp::kFarConnections);
  EXPECT_EQ(tcp::connectionsOver(5e-3, 9), tcp::kFarConnections);
  EXPECT_EQ(tcp::connectionsOver(5e-3, 17), tcp::kFarConnections / 2);
  EXPECT_EQ(tcp::connectionsOver(5e-3, 1000), 1);
  for (const char* control : {"", "reno"}) {
    ASSERT_EQ(::setenv("LOWCOMM_CONGESTION", control, 1), 0);
    if (*control) EXPECT_TRUE(tcp::isLossBased());
    for (const size_t size : {2, 3}) {
      Reach ranks(std::vector<EndpointOptions>(size, onLoopback()), /*connections=*/0);
      for (const std::string& error : ranks.errors)
        EXPECT_EQ(error, "");
      for (const auto& transport : ranks.transports)
        EXPECT_EQ(transport->report().size(), 2 * (size - 1));
      ranks.exchange(0, 1);
    }
  }
  ::unsetenv("LOWCOMM_CONGESTION");
}

// Neither can be reached, and neither says so.
TEST(TcpReach, TwoWhoCannotBeReachedFindTheRelay) {
  const auto [listener, port] = tcp::listenOn("127.0.0.1", "0", "a port that nobody serves");
  EndpointOptions unreachable = onLoopback();
  unreachable.advertise = "127.0.0.1:" + port;
  Reach ranks({unreachable, unreachable, onLoopback()});
  for (const std::string& error : ranks.errors)
    ASSERT_EQ(error, "");
  ranks.exchange(0, 1);
  expectPath(*ranks.transports[0], 1, "relay " + ranks.endpoints[2]->addresses()[0]);
}

// Rank 0 was to be dialled and cannot be: it dials, and goes on doing so.
void expectTurned(const std::string& advertised) {
  EndpointOptions unreachable = onLoopback();
  unreachable.advertise = advertised;
  Reach ranks({unreachable, onLoopback()});
  ASSERT_EQ(ranks.errors[0], "");
  ASSERT_EQ(ranks.errors[1], "");
  ranks.exchange(0, 1);
  ranks.exchange(0, 1, /*cut=*/true);
  ranks.exchange(1, 0, /*cut=*/true);
}

TEST(TcpReach, WhoseAddressRefusesDialsItself) {
  expectTurned("127.0.0.1:1");
}

TEST(TcpReach, WhoseAddressIsSilentDialsItself) {
  const auto [listener, port] = tcp::listenOn("127.0.0.1", "0", "a port that nobody serves");
  expectTurned("127.0.0.1:" + port);
}

// An address that changes: the peer's redials lead nowhere from then on.
TEST(TcpReach, WhoseAddressIsSilentLaterDialsItself) {
  Reach ranks({onLoopback(), onLoopback()});
  ranks.exchange(0, 1);
  ranks.endpoints[0]->deafen();
  ranks.exchange(0, 1, /*cut=*/true);
}

}  // namespace
}  // namespace lowcomm
