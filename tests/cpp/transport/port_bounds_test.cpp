// The bounds of a port on what it gives to clients of a tunnel, ranks that request a relay and peers of a channel; the
// error where poll() fails.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "ranks_on_threads.h"
#include "transport/tcp/tunnel.h"
#include "transport/tcp_ranks.h"

namespace lowcomm::tcp {
namespace {

using namespace std::chrono_literals;

Fd dialWithDeadline(const Endpoint& endpoint) {
  Fd fd = dial(endpoint);
  const timeval most{kLong.count() / 1000, 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &most, sizeof(most));
  return fd;
}

Hello helloTo(const GroupId& group, uint32_t from) {
  return {.group = group, .from = from, .incarnation = 1000 + from, .carries = true};
}

void say(const Fd& fd, const Hello& hello, const std::optional<RelayCode>& code = {}) {
  std::array<std::byte, kHelloBytes + kRelayCodeBytes> bytes{};
  write(hello, std::span(bytes).first<kHelloBytes>());
  if (code) std::ranges::copy(*code, bytes.begin() + kHelloBytes);
  ::send(fd.get(), bytes.data(), hello.relays ? bytes.size() : kHelloBytes, MSG_NOSIGNAL);
}

// The answer to a hello; nothing where the connection is closed without one.
std::optional<Hello> answerOf(const Fd& fd) {
  std::array<std::byte, kHelloBytes> bytes;
  if (::recv(fd.get(), bytes.data(), bytes.size(), MSG_WAITALL) != kHelloBytes) return {};
  return parseHello(bytes);
}

struct Port {
  explicit Port(size_t ranks) {
    auto [fd, number] = listenOnLoopback();
    server = std::move(fd);  // its backlog takes connections that nobody accepts
    exit = std::make_unique<TunnelExit>(endpoint, number, ranks);
  }

  bool admits(uint32_t from) {
    Fd fd = dialWithDeadline(*endpoint);
    say(fd, helloTo(tunnelGroup(), from));
    const auto answer = answerOf(fd);
    if (answer && answer->carries) held.push_back(std::move(fd));
    return answer && answer->carries;
  }

  Fd server;
  std::shared_ptr<Endpoint> endpoint = std::make_shared<Endpoint>(onLoopback());
  std::unique_ptr<TunnelExit> exit;
  std::vector<Fd> held;
};

TEST(PortBounds, ClientsOfAnAddressHaveSoManyStreams) {
  for (const size_t ranks : {0, 3}) {
    Port port(ranks);
    size_t admitted = 0;
    for (uint32_t from = 1; from <= 40; ++from)
      admitted += port.admits(from);
    EXPECT_EQ(admitted, TunnelExit::kOfAHost + 4 * ranks);
  }
}

TEST(PortBounds, ThoseWhoHangUpKeepNobodyOut) {
  Port port(0);
  for (uint32_t from = 1; from <= 1100; ++from) {
    const Fd fd = dial(*port.endpoint);
    say(fd, helloTo(tunnelGroup(), from));
  }
  // The endpoint may not have read the last clients' closes yet.
  const auto until = Clock::now() + kLong;
  bool is_admitted = false;
  for (uint32_t from = 5000; !is_admitted && Clock::now() < until; ++from)
    is_admitted = port.admits(from);
  EXPECT_TRUE(is_admitted);
}

TEST(PortBounds, WhoOnlyAsksOrGoesOnHasNoStream) {
  Port port(0);
  for (const bool carries : {false, true}) {
    const Fd fd = dialWithDeadline(*port.endpoint);
    Hello hello = helloTo(tunnelGroup(), 5);
    hello.carries = carries;
    hello.received = carries ? 7 : 0;
    say(fd, hello);
    const auto answer = answerOf(fd);
    ASSERT_TRUE(answer);
    EXPECT_TRUE(answer->unknown && !answer->carries);
  }
}

// What a client leaves behind that does not come back.
TEST(PortBounds, AChannelWithoutAConnectionEndsAfterItsPatience) {
  Endpoint endpoint(onLoopback());
  Route route;
  route.peer = 1;
  route.patience = 1s;
  const auto link = std::make_shared<Link>(route);
  endpoint.add(link);
  Bytes room(1);
  const auto receive = link->channel.receive(0, room);
  EXPECT_TRUE(test::holds(test::thrownBy<TransportError>([&] { receive->wait(1, kLong); }),
                          {"expected a connection within 1 s, got none"}));
  endpoint.remove(link);
}

struct Asking {
  Asking(const Endpoint& relay, const Hello& hello, const std::optional<RelayCode>& code)
      : fd(dialWithDeadline(relay)) {
    say(fd, hello, code);
  }
  Fd fd;
};

Hello request(const GroupId& group, uint32_t from, uint32_t to, uint64_t incarnation) {
  Hello hello{.group = group, .from = from, .to = to, .channel = 1, .incarnation = incarnation};
  hello.relays = true;
  return hello;
}

// Whether two connections that request each other are joined. Each is answered or closed.
bool joins(const Endpoint& relay, const Hello& a, const Hello& b, const std::optional<RelayCode>& code_a = {},
           const std::optional<RelayCode>& code_b = {}) {
  const Asking one(relay, a, code_a), two(relay, b, code_b);
  const auto answer_a = answerOf(one.fd), answer_b = answerOf(two.fd);
  if (!answer_a || !answer_b) return false;
  const std::string said = "any bytes of two ranks";
  ::send(one.fd.get(), said.data(), said.size(), MSG_NOSIGNAL);
  std::string got(said.size(), 0);
  ::recv(two.fd.get(), got.data(), got.size(), MSG_WAITALL);
  return got == said;
}

GroupId groupOf(Ranks& ranks) {
  GroupId group;
  std::memcpy(group.data(), ranks.rendezvous.get("lowcomm/tcp/group").data(), group.size());
  return group;
}

TEST(PortBounds, ARankRelaysForRanksOfItsGroupAlone) {
  Ranks ranks(3);
  const GroupId group = groupOf(ranks);
  const Endpoint& relay = *ranks.endpoints[0];
  const uint64_t one = ranks.endpoints[1]->incarnation(), two = ranks.endpoints[2]->incarnation();
  EXPECT_TRUE(joins(relay, request(group, 1, 2, one), request(group, 2, 1, two)));
  EXPECT_FALSE(joins(relay, request(group, 1, 2, 5), request(group, 2, 1, 6))) << "other processes";
  EXPECT_FALSE(joins(relay, request(group, 1, 3, one), request(group, 3, 1, two))) << "no rank";
  GroupId other = group;
  other[3] ^= std::byte{1};
  EXPECT_FALSE(joins(relay, request(other, 1, 2, one), request(other, 2, 1, two))) << "another group";
}

// The group of a tunnel has a name that everybody knows, and its clients are no ranks.
TEST(PortBounds, AnExitIsNoRelay) {
  Port port(2);
  ASSERT_TRUE(port.admits(7));
  ASSERT_TRUE(port.admits(8));
  const GroupId group = tunnelGroup();
  EXPECT_FALSE(joins(*port.endpoint, request(group, 7, 8, 1007), request(group, 8, 7, 1008)));
  EXPECT_EQ(port.endpoint->relayed().first, 0u);
}

TEST(PortBounds, WithASecretARelayAsksForItsCode) {
  if (tlsLibrary().empty()) GTEST_SKIP() << "this build has no OpenSSL";
  Ranks ranks(3, 1, aSecret());
  EndpointOptions alone = onLoopback(aSecret());
  alone.relays_all = true;
  const Endpoint process(alone);
  const GroupId group = groupOf(ranks);
  const Hello a = request(group, 1, 2, ranks.endpoints[1]->incarnation());
  const Hello b = request(group, 2, 1, ranks.endpoints[2]->incarnation());
  const Tls tls(aSecret()), other(aSecret('c'));
  for (const Endpoint* relay : {static_cast<const Endpoint*>(ranks.endpoints[0].get()), &process}) {
    EXPECT_FALSE(joins(*relay, a, b)) << "no code";
    EXPECT_FALSE(joins(*relay, a, b, other.relayCode(a), other.relayCode(b))) << "another secret's";
    EXPECT_FALSE(joins(*relay, a, b, tls.relayCode(b), tls.relayCode(a))) << "another request's";
    EXPECT_TRUE(joins(*relay, a, b, tls.relayCode(a), tls.relayCode(b)));
  }
}

TEST(PortBounds, ARelayHasSoManyConnectionsForAnAddress) {
  EndpointOptions options = onLoopback();
  options.relays_all = true;
  Endpoint relay(options);
  const GroupId group{};
  std::vector<std::unique_ptr<Asking>> held;
  size_t joined = 0;
  for (uint32_t i = 0; i < Relay::kOfAHost; i += 2) {
    held.push_back(std::make_unique<Asking>(relay, request(group, i, i + 1, 1), std::nullopt));
    held.push_back(std::make_unique<Asking>(relay, request(group, i + 1, i, 2), std::nullopt));
    joined += answerOf(held[i]->fd) && answerOf(held[i + 1]->fd);
  }
  EXPECT_EQ(joined, Relay::kOfAHost / 2);
  const Asking more(relay, request(group, 9000, 9001, 1), std::nullopt);
  EXPECT_FALSE(answerOf(more.fd)) << "it is hung up on";
}

TEST(PortBounds, AProcessThatCannotWaitSaysSo) {
  Ranks ranks(2);
  Bytes room(10);
  const auto receive = ranks[0].irecv(Lane::bulk, 1, 0, room);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{1, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  const std::string why = test::thrownBy<TransportError>([&] { receive->wait(kLong); });
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(test::holds(why, {"poll: expected to wait for", "descriptors, got: Invalid argument"})) << why;
}

}  // namespace
}  // namespace lowcomm::tcp
