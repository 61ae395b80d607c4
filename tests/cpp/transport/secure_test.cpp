#include "transport/tcp/secure.h"

#include <gtest/gtest.h>
#if LOWCOMM_OPENSSL
#include <openssl/ec.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#endif
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/tcp_ranks.h"

// Ends of one connection, without endpoints; endpoints with a secret are in secret_test.cpp and strangers_test.cpp.

namespace lowcomm {
namespace {

using tcp::Identity;
using tcp::SecurePipe;
using tcp::Tls;
using Wrong = tcp::Pipe::Wrong;

constexpr uint64_t kHere = 77, kThere = 88;  // incarnations: of the accepting process, of the dialling one

class TcpSecure : public testing::Test {
 protected:
  void SetUp() override {
    if (tcp::tlsLibrary().empty()) GTEST_SKIP() << "this build has no OpenSSL";
  }
};

std::pair<tcp::Fd, tcp::Fd> sockets() {
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
  return {tcp::Fd(fds[0]), tcp::Fd(fds[1])};
}

Identity identityOf(Identity::Suite suite = Identity::Suite::aes_256_gcm) {
  Identity identity{.from = 1, .to = 0, .channel = 2, .incarnation = kThere, .peer_incarnation = kHere, .suite = suite};
  for (size_t i = 0; i < identity.group.size(); ++i)
    identity.group[i] = static_cast<std::byte>(i);
  return identity;
}

std::shared_ptr<Tls> tlsOf(char first = 'b', uint64_t records_per_key = 1 << 20) {
  return std::make_shared<Tls>(aSecret(first), records_per_key);
}

// Both ends of a connection, and why they could not be opened.
struct Ends {
  Ends(const std::shared_ptr<Tls>& dialling, const std::shared_ptr<Tls>& accepting, Identity identity = identityOf(),
       uint64_t here = kHere) {
    auto [one, other] = sockets();
    dials = dialling->dial(std::move(one), identity);
    accepts = accepting->accept(std::move(other), here);
    for (int i = 0; i < 10 && !dialled && !(dials->isOpen() && accepts->isOpen()); ++i) {
      if (!dials->isOpen()) dialled = dials->open();
      if (!accepts->isOpen() && !accepted) accepted = accepts->open();
    }
  }
  bool open() const { return dials->isOpen() && accepts->isOpen(); }

  std::unique_ptr<SecurePipe> dials, accepts;
  std::optional<std::string> dialled, accepted;
};

// Whatever one end writes, in parts of all sizes, the other reads, however little of it at a time.
void expectCarries(SecurePipe& from, SecurePipe& to, size_t room) {
  std::vector<Bytes> parts;
  Bytes all, got;
  for (const size_t size : {1, 16, 5, 20'000, 16'384, 3, 70'000, 40'000, 16'383}) {
    parts.push_back(message(size, static_cast<unsigned>(size)));
    all.insert(all.end(), parts.back().begin(), parts.back().end());
  }
  size_t written = 0;
  for (int idle = 0; got.size() < all.size() && idle < 3;) {
    std::vector<iovec> left;
    size_t skipped = written;
    for (Bytes& part : parts) {
      if (skipped >= part.size()) {
        skipped -= part.size();
      } else {
        left.push_back({part.data() + skipped, part.size() - skipped});
        skipped = 0;
      }
    }
    const tcp::Moved moved = left.empty() ? tcp::Moved{0, from.flush()} : from.write(left);
    ASSERT_FALSE(moved.over) << *moved.over;
    written += moved.bytes;
    const size_t before = got.size();
    for (size_t turn = 1 << 20;;) {
      Bytes some(room);
      const tcp::Moved read = to.read(some, turn);
      ASSERT_FALSE(read.over) << *read.over;
      if (read.bytes == 0) break;
      got.insert(got.end(), some.begin(), some.begin() + read.bytes);
    }
    idle = moved.bytes == 0 && got.size() == before ? idle + 1 : 0;
  }
  ASSERT_EQ(got, all);
}

TEST_F(TcpSecure, CarriesBytesBothWaysByEitherSuite) {
  for (const auto suite : {Identity::Suite::aes_256_gcm, Identity::Suite::chacha20_poly1305}) {
    Ends ends(tlsOf(), tlsOf(), identityOf(suite));
    ASSERT_TRUE(ends.open()) << ends.dialled.value_or("") << ends.accepted.value_or("");
    EXPECT_EQ(ends.accepts->identity()->channel, 2u);
    for (const size_t room : {7, 30'000}) {
      expectCarries(*ends.dials, *ends.accepts, room);
      expectCarries(*ends.accepts, *ends.dials, room);
    }
  }
}

// Keys change under way, more often than any limit on how often they may.
int lowWater(const SecurePipe& pipe) {
  int bytes = 0;
  socklen_t size = sizeof(bytes);
  EXPECT_EQ(::getsockopt(pipe.fd(), SOL_SOCKET, SO_RCVLOWAT, &bytes, &size), 0);
  return bytes;
}

int waiting(const SecurePipe& pipe) {
  int bytes = 0;
  EXPECT_EQ(::ioctl(pipe.fd(), FIONREAD, &bytes), 0);
  return bytes;
}

// So many as the records take that the bytes come in, from wherever in them the socket is.
TEST_F(TcpSecure, ExpectsTheBytesOfWholeRecords) {
  Ends ends(tlsOf(), tlsOf());
  ASSERT_TRUE(ends.open());
  Bytes room(1);
  size_t turn = 1 << 20;
  while (ends.accepts->read(room, turn).bytes > 0) {
  }
  for (const size_t size : {100, 16'384, 20'000}) {
    ends.accepts->expect(size);
    const size_t records = (size + 16'383) / 16'384, all = size + 22 * records;
    EXPECT_EQ(lowWater(*ends.accepts), static_cast<int>(size + 22));
    Bytes sent = message(size, 1), got(size);
    const iovec part{sent.data(), sent.size()};
    ASSERT_EQ(ends.dials->write({&part, 1}).bytes, size);
    ASSERT_EQ(waiting(*ends.accepts), static_cast<int>(all));
    for (const size_t some : {3, 2, 45}) {
      turn = some;
      ASSERT_EQ(ends.accepts->read(got, turn).bytes, 0u);
      ends.accepts->expect(size);
      EXPECT_LE(lowWater(*ends.accepts), waiting(*ends.accepts));
      EXPECT_GE(lowWater(*ends.accepts), waiting(*ends.accepts) - 22 * static_cast<int>(records - 1));
    }
    turn = 1 << 20;
    for (size_t have = 0; have < size;) {
      const tcp::Moved moved = ends.accepts->read(std::span(got).subspan(have), turn);
      ASSERT_GT(moved.bytes, 0u);
      have += moved.bytes;
    }
    EXPECT_EQ(got, sent);
  }
}

TEST_F(TcpSecure, ChangesItsKeys) {
  Ends ends(tlsOf('b', 2), tlsOf('b', 3));
  ASSERT_TRUE(ends.open());
  for (int round = 0; round < 20; ++round) {
    expectCarries(*ends.dials, *ends.accepts, 9'000);
    expectCarries(*ends.accepts, *ends.dials, 9'000);
  }
}

TEST_F(TcpSecure, AnotherSecretIsNamedByBothEnds) {
  Ends ends(tlsOf('b'), tlsOf('c'));
  EXPECT_FALSE(ends.open());
  ASSERT_TRUE(ends.dialled && ends.accepted);
  EXPECT_EQ(ends.accepts->wrong(), Wrong::secret) << *ends.accepted;
  EXPECT_EQ(ends.dials->wrong(), Wrong::secret) << *ends.dialled;
  EXPECT_EQ(ends.accepts->identity()->from, 1u) << "who it is that has another secret";
}

TEST_F(TcpSecure, AnotherProcessIsTurnedAwayWithoutAKey) {
  Ends ends(tlsOf(), tlsOf(), identityOf(), kHere + 1);
  EXPECT_FALSE(ends.open());
  ASSERT_TRUE(ends.dialled && ends.accepted);
  EXPECT_EQ(ends.accepts->wrong(), Wrong::nothing);
  EXPECT_EQ(ends.dials->wrong(), Wrong::process) << *ends.dialled;
}

// All that can be read of the dialling end: one record, with the identity and without the secret.
TEST_F(TcpSecure, SaysTheIdentityInTheClear) {
  auto [one, other] = sockets();
  const auto dials = tlsOf()->dial(std::move(one), identityOf());
  EXPECT_FALSE(dials->open());
  std::array<std::byte, 2048> hello;
  const ssize_t size = ::recv(other.get(), hello.data(), hello.size(), 0);
  ASSERT_GT(size, 9);
  EXPECT_EQ(tcp::clientHelloBytes(std::span(hello).first(size)), static_cast<size_t>(size));
  const std::string text(reinterpret_cast<const char*>(hello.data()), size);
  std::array<std::byte, tcp::kIdentityBytes> identity;
  tcp::write(identityOf(), identity);
  EXPECT_NE(text.find(std::string(reinterpret_cast<const char*>(identity.data()), identity.size())), std::string::npos);
  EXPECT_EQ(text.find(aSecret().text()), std::string::npos);
}

#if LOWCOMM_OPENSSL

// TLS would take a certificate in place of the key; neither end does.
TEST_F(TcpSecure, ACertificateIsNoSecret) {
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(EVP_EC_gen("P-256"), &EVP_PKEY_free);
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(X509_new(), &X509_free);
  X509_set_pubkey(certificate.get(), key.get());
  X509_gmtime_adj(X509_getm_notBefore(certificate.get()), 0);
  X509_gmtime_adj(X509_getm_notAfter(certificate.get()), 3600);
  ASSERT_GT(X509_sign(certificate.get(), key.get(), EVP_sha256()), 0);
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_method()), &SSL_CTX_free);
  ASSERT_EQ(SSL_CTX_use_certificate(context.get(), certificate.get()), 1);
  ASSERT_EQ(SSL_CTX_use_PrivateKey(context.get(), key.get()), 1);
  for (const bool dials : {true, false}) {
    auto [one, other] = sockets();
    const auto pipe = dials ? tlsOf()->dial(std::move(one), identityOf()) : tlsOf()->accept(std::move(one), kHere);
    const std::unique_ptr<SSL, decltype(&SSL_free)> ssl(SSL_new(context.get()), &SSL_free);
    SSL_set_fd(ssl.get(), other.get());
    dials ? SSL_set_accept_state(ssl.get()) : SSL_set_connect_state(ssl.get());
    std::optional<std::string> over;
    for (int i = 0; i < 10 && !over && !pipe->isOpen(); ++i) {
      if (!dials) SSL_do_handshake(ssl.get());
      over = pipe->open();
      if (dials) SSL_do_handshake(ssl.get());
    }
    ASSERT_TRUE(over && !pipe->isOpen()) << dials;
    EXPECT_NE(over->find(dials ? "certificate" : "TLS"), std::string::npos) << *over;
  }
}

#endif

// What one end has said, all of it, is said again to another connection of the same end: it is never opened.
TEST_F(TcpSecure, NothingCanBeReplayedOrReflected) {
  const auto tls = tlsOf();
  auto [one, other] = sockets();
  const auto dials = tls->dial(std::move(one), identityOf());
  EXPECT_FALSE(dials->open());
  std::array<std::byte, 2048> hello;
  const ssize_t size = ::recv(other.get(), hello.data(), hello.size(), 0);
  const auto answered = [&](uint64_t here, std::string& answer) {
    auto [theirs, ours] = sockets();
    EXPECT_EQ(::send(theirs.get(), hello.data(), size, 0), size);
    const auto accepts = tls->accept(std::move(ours), here);
    const auto over = accepts->open();
    std::array<char, 4096> bytes;
    const ssize_t got = ::recv(theirs.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    answer.assign(bytes.data(), std::max<ssize_t>(0, got));
    EXPECT_FALSE(accepts->isOpen());
    return !over;
  };
  std::string first, second, reflected;
  EXPECT_TRUE(answered(kHere, first)) << "it is answered, and leads nowhere without the key of the exchange";
  EXPECT_TRUE(answered(kHere, second));
  EXPECT_NE(first, second) << "another exchange each time";
  EXPECT_FALSE(answered(kThere, reflected)) << "its own sender turns it away";
}

// A key is good for one connection: one rank to another's process, one channel, one group, one suite, one secret.
TEST_F(TcpSecure, EveryConnectionHasAKeyOfItsOwn) {
  const auto tls = tlsOf();
  std::vector<Identity> identities(8, identityOf());
  identities[1].group[5] = std::byte{99};
  identities[2].from = 2;
  identities[3].to = 2;
  identities[4].channel = 0;
  identities[5].incarnation = 1;
  identities[6].peer_incarnation = 1;
  identities[7].suite = Identity::Suite::chacha20_poly1305;
  std::set<std::array<std::byte, 32>> keys{tlsOf('c')->key(identityOf())};
  for (const Identity& identity : identities)
    keys.insert(tls->key(identity));
  EXPECT_EQ(keys.size(), identities.size() + 1);
}

// As FORMAT.md has it: computed with Python's hmac by tests/python/transport/test_secret.py, too.
TEST_F(TcpSecure, DerivesTheDocumentedKeyAndCode) {
  const auto textOf = [](std::span<const std::byte> bytes) {
    std::string text;
    for (const std::byte b : bytes) {
      std::array<char, 3> two;
      std::snprintf(two.data(), two.size(), "%02x", std::to_integer<unsigned>(b));
      text += two.data();
    }
    return text;
  };
  const tcp::Identity identity = identityOf();
  EXPECT_EQ(textOf(tlsOf()->key(identity)), "39a7ff695b05d41dfdca2ece321868441edaf20563671863b5eeaecbd07c4334");
  tcp::Hello hello{.group = identity.group, .from = 1, .to = 2, .channel = 1, .incarnation = 88, .relays = true};
  tcp::RelayCode code = tlsOf()->relayCode(hello);
  EXPECT_EQ(textOf(code), "d7b140d6189b7e1505d3abf85d72f8776da7d95bb178bdbde1d27cf60f6b9a2f");
  EXPECT_TRUE(tlsOf()->isRelayCode(hello, code));
  code[31] ^= std::byte{1};
  EXPECT_FALSE(tlsOf()->isRelayCode(hello, code));
  hello.to = 3;
  EXPECT_FALSE(tlsOf()->isRelayCode(hello, tlsOf()->relayCode({})));
}

TEST_F(TcpSecure, ReadsNoMoreThanAClientHelloOfAStranger) {
  for (const char* begin :
       {"\x16\x03\x01\x40\x00\x01\x00\x00", "\x17\x03\x01\x00\x40\x01\x00\x00", "GET / HTTP/1.1\r\n\r\n",
        "\x16\x03\x01\x01\x00\x02\x00\x00\xfc", "\x16\x03\x01\x01\x00\x01\x02\x00\xfc"}) {
    auto [theirs, ours] = sockets();
    const auto accepts = tlsOf()->accept(std::move(ours), kHere);
    ASSERT_EQ(::send(theirs.get(), begin, 9, 0), 9);  // of the shorter ones with the zero at their end
    EXPECT_TRUE(accepts->open()) << begin;
    EXPECT_EQ(accepts->wrong(), Wrong::nothing);
  }
}

TEST(TcpWire, RefusesWhatIsNoIdentity) {
  std::array<std::byte, tcp::kIdentityBytes> bytes;
  tcp::write(identityOf(Identity::Suite::chacha20_poly1305), bytes);
  const Identity read = tcp::parseIdentity(bytes);
  EXPECT_EQ(std::tuple(read.from, read.to, read.channel, read.incarnation, read.peer_incarnation, read.suite),
            std::tuple(1u, 0u, 2u, kThere, kHere, Identity::Suite::chacha20_poly1305));
  EXPECT_THROW(tcp::parseIdentity(std::span(bytes).first(55)), WireError);
  for (const size_t wrong : {0, 52, 55}) {
    auto other = bytes;
    other[wrong] ^= std::byte{0x40};
    EXPECT_THROW(tcp::parseIdentity(other), WireError) << wrong;
  }
}

}  // namespace
}  // namespace lowcomm
