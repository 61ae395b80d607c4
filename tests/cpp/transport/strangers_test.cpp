#include "transport/tcp/strangers.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/tcp_ranks.h"

namespace lowcomm {
namespace {

using tcp::Strangers;

// What a port without and with a secret does with those who are no members.
class TcpStrangers : public SecretOrNot {
 protected:
  std::shared_ptr<tcp::Tls> tls() const { return GetParam() ? std::make_shared<tcp::Tls>(aSecret()) : nullptr; }
};

INSTANTIATE_TEST_SUITE_P(Tcp, TcpStrangers, secretOrNot(), secretName);

// The other ends of connections that were admitted, of an address each.
struct Crowd {
  explicit Crowd(Strangers& strangers) : strangers(strangers) {}
  tcp::Fd& add(uint32_t address) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
    tcp::Address from;
    auto* to = reinterpret_cast<sockaddr_in*>(from.get());
    to->sin_family = AF_INET;
    to->sin_addr.s_addr = address;
    strangers.admit(tcp::Fd(fds[0]), from);
    return ends.emplace_back(fds[1]);
  }
  static bool lives(const tcp::Fd& end) {
    char byte;
    return ::recv(end.get(), &byte, 1, MSG_DONTWAIT) != 0;
  }
  Strangers& strangers;
  std::vector<tcp::Fd> ends;
};

Strangers::PendingHello hear(Strangers& strangers) {
  std::vector<pollfd> waits;
  strangers.waitFor(waits);
  ::poll(waits.data(), waits.size(), 0);
  return strangers.hear(waits);
}

TEST_P(TcpStrangers, AreBoundedInAllAndOfAnAddress) {
  Strangers strangers("1", tls(), 77);
  Crowd crowd(strangers);
  for (uint32_t i = 0; i < 200; ++i)
    crowd.add(1000 + i);
  EXPECT_EQ(strangers.size(), Strangers::kHalfOpen);
  EXPECT_FALSE(Crowd::lives(crowd.ends[0])) << "the oldest has given way";
  EXPECT_TRUE(Crowd::lives(crowd.ends[199]));
  Strangers others("1", tls(), 77);
  Crowd hosts(others);
  for (uint32_t i = 0; i < 30; ++i)
    hosts.add(i % 2);
  EXPECT_EQ(others.size(), 2 * Strangers::kOfAHost);
  EXPECT_TRUE(Crowd::lives(hosts.ends[29]) && Crowd::lives(hosts.ends[28]));
}

TEST_P(TcpStrangers, AreHeardAFewAtATime) {
  Strangers strangers("1", tls(), 77);
  Crowd crowd(strangers);
  const std::string said(tcp::kHelloBytes, 'g');
  for (uint32_t i = 0; i < 20; ++i)
    ASSERT_EQ(::send(crowd.add(1000 + i).get(), said.data(), said.size(), 0), static_cast<ssize_t>(said.size()));
  for (size_t left = 20; left > 0; left -= Strangers::kHeardATurn) {
    EXPECT_EQ(strangers.size(), left);
    EXPECT_EQ(hear(strangers).all, left == Strangers::kHeardATurn);
  }
  EXPECT_EQ(strangers.size(), 0u);
}

// However slowly somebody speaks, he has no more than the time that all have.
TEST_P(TcpStrangers, WhoSpeaksSlowlyIsLetGo) {
  Strangers strangers("1", tls(), 77);
  Crowd crowd(strangers);
  const tcp::Fd& end = crowd.add(5);
  const auto start = Strangers::Clock::now();
  const char begin[] = "\x16\x03\x01\x01\x00\x01\x00\x00\xfc";  // of a ClientHello, and of nothing without a secret
  for (size_t i = 0; strangers.size() > 0; ++i) {
    ASSERT_LT(Strangers::Clock::now() - start, 2 * Strangers::kWithin);
    ::send(end.get(), begin + std::min<size_t>(i, 8), 1, MSG_NOSIGNAL);
    hear(strangers);
    std::this_thread::sleep_for(milliseconds(70));  // 64 bytes, of a Hello or a ClientHello, take longer than there is
  }
  EXPECT_GE(Strangers::Clock::now() - start, Strangers::kWithin);
}

TEST_P(TcpStrangers, AreCountedInALineOfTheLog) {
  Strangers strangers("29600", tls(), 77, milliseconds(100));
  Crowd crowd(strangers);
  for (uint32_t i = 0; i < 10; ++i)
    crowd.add(0x0100007f);
  testing::internal::CaptureStderr();
  for (int i = 0; i < 30; ++i) {
    strangers.report();
    std::this_thread::sleep_for(milliseconds(10));
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(said,
            "lowcomm: port 29600: 2 connections from outside came to nothing: 2 gave way to later ones; the last from "
            "127.0.0.1\n");
}

size_t residentKiB() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmRSS:", 0) == 0) return std::stoul(line.substr(6));
  }
  return 0;
}

// Three thousand of them, silent, with garbage, and with ClientHellos, while ranks exchange and are cut now and then.
TEST_P(TcpStrangers, ThreeThousandCostMembersNothingButTime) {
  Ranks ranks(2, 1, secret());
  const Bytes out = message(300'000, 5);
  const auto exchange = [&] {
    ranks.each([&](int rank) {
      Bytes in(out.size());
      const auto received = ranks[rank].irecv(Lane::bulk, 1 - rank, 0, in);
      const auto sent = ranks[rank].isend(Lane::bulk, 1 - rank, 0, out);
      ASSERT_NO_THROW(received->wait(kLong));
      ASSERT_NO_THROW(sent->wait(kLong));
      ASSERT_EQ(in, out);
    });
  };
  exchange();
  [[maybe_unused]] const size_t before = residentKiB();
  std::atomic<int> made{0};
  std::thread crowd([&] {
    std::string hello("\x16\x03\x01\x01\x00\x01\x00\x00\xfc\x03\x03", 11);
    hello.resize(261, 'x');
    std::vector<tcp::Fd> strangers;
    for (int i = 0; i < 3000; ++i, ++made) {
      strangers.push_back(dial(*ranks.endpoints[i % 2]));
      const std::string said = i % 3 == 0 ? "" : i % 3 == 1 ? hello : std::string(700, 'g');
      if (!said.empty()) ::send(strangers.back().get(), said.data(), said.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (strangers.size() > 150) strangers.erase(strangers.begin());
    }
  });
  for (int round = 0; made < 3000; ++round) {
    if (round % 5 == 4) ranks.endpoints[round % 2]->cut();
    exchange();
  }
  crowd.join();
  exchange();
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(residentKiB(), before + 16 * 1024) << "KiB";
#endif
}

class TcpSecretPort : public testing::Test {
 protected:
  void SetUp() override {
    if (tcp::tlsLibrary().empty()) GTEST_SKIP() << "this build has no OpenSSL";
  }
};

// A socket's end becomes quiet: nothing was said to it, and it is closed.
void expectClosedWithoutAWord(const tcp::Fd& fd) {
  std::array<std::byte, 64> bytes;
  pollfd wait{fd.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&wait, 1, 10'000), 1);
  EXPECT_LE(::recv(fd.get(), bytes.data(), bytes.size(), 0), 0);
}

tcp::Hello helloOf(Ranks& ranks, uint32_t channel) {
  tcp::Hello hello{.from = 1, .to = 0, .channel = channel, .incarnation = ranks.endpoints[1]->incarnation()};
  const std::string group = ranks.rendezvous.get("lowcomm/tcp/group");
  std::memcpy(hello.group.data(), group.data(), group.size());
  return hello;
}

// As someone who knows all that is not secret: the group, the ranks and the incarnations.
std::optional<tcp::Hello> answerTo(Ranks& ranks, const tcp::Secret& secret, uint32_t channel, const tcp::Hello& said) {
  const tcp::Hello like = helloOf(ranks, channel);
  const auto tls = std::make_shared<tcp::Tls>(secret);
  const auto pipe = tls->dial(dial(*ranks.endpoints[0]), {like.group, 1, 0, channel, like.incarnation,
                                                          ranks.endpoints[0]->incarnation(), tcp::Tls::preferred()});
  while (!pipe->isOpen()) {
    if (pipe->open()) return {};
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_TRUE(tcp::sendHello(*pipe, said));
  std::array<std::byte, tcp::kHelloBytes> bytes;
  for (size_t have = 0; have < bytes.size();) {
    pollfd wait{pipe->fd(), POLLIN, 0};
    ::poll(&wait, 1, 10'000);
    size_t turn = 1000;
    const tcp::Moved got = pipe->read(std::span(bytes).subspan(have), turn);
    if (got.over) return {};
    have += got.bytes;
  }
  return tcp::parseHello(bytes);
}

TEST_F(TcpSecretPort, SpeaksNothingButTlsToWhoHasTheSecret) {
  Ranks ranks(2, 2, aSecret());
  const tcp::Fd plain = dial(*ranks.endpoints[0]);
  std::array<std::byte, tcp::kHelloBytes> bytes;
  write(helloOf(ranks, 1), bytes);
  ASSERT_EQ(::send(plain.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  expectClosedWithoutAWord(plain);
  EXPECT_FALSE(answerTo(ranks, aSecret('c'), 1, helloOf(ranks, 1))) << "another secret";
  EXPECT_FALSE(answerTo(ranks, aSecret(), 1, helloOf(ranks, 2))) << "another channel than its key is for";
  tcp::Hello other = helloOf(ranks, 1);
  other.from = 3;
  EXPECT_FALSE(answerTo(ranks, aSecret(), 1, other)) << "another rank";
  const auto real = answerTo(ranks, aSecret(), 1, helloOf(ranks, 1));
  ASSERT_TRUE(real) << "a member";
  EXPECT_FALSE(real->unknown);
}

// The other way round, a dialling end with a secret tells a plain port nothing.
TEST_F(TcpSecretPort, TellsAPlainPortNothing) {
  Ranks ranks(2, 1);
  EXPECT_FALSE(answerTo(ranks, aSecret(), 1, helloOf(ranks, 1)));
}

// A group that is gone is told so, by the process that has the secret.
TEST_F(TcpSecretPort, SaysThatAGroupIsUnknown) {
  Ranks ranks(2, 1, aSecret());
  const tcp::Hello hello = helloOf(ranks, 1);
  ranks.transports[0].reset();
  const auto answer = answerTo(ranks, aSecret(), 1, hello);
  ASSERT_TRUE(answer);
  EXPECT_TRUE(answer->unknown);
}

}  // namespace
}  // namespace lowcomm
