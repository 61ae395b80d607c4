#include <gtest/gtest.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/tcp/link.h"
#include "transport/tcp/relay.h"
#include "transport/tcp/socket.h"
#include "transport/tcp_ranks.h"
#include "transport/transport_cases.h"

// A rank leaves, and its last words reach its peer, though nobody reads what the peer says meanwhile.

namespace lowcomm::tcp {
namespace {

using Clock = std::chrono::steady_clock;

// A connection over loopback: the end of a rank, and the other one, which does not block.
std::pair<Fd, Fd> connected() {
  auto [listener, port] = listenOn("127.0.0.1", "0", "test");
  const Address address = resolve("127.0.0.1:" + port, "test").front();
  Fd mine(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(mine.get(), address.get(), address.size), 0);
  pollfd comes{listener.get(), POLLIN, 0};
  ::poll(&comes, 1, 5000);
  return {std::move(mine), Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC))};
}

// Two ranks and the relay between them.
struct Relayed {
  Relayed() {
    for (uint32_t rank : {0, 1}) {
      auto [mine, relays] = connected();
      ranks[rank] = std::move(mine);
      EXPECT_TRUE(relay.admit(std::move(relays), Hello{.from = rank, .to = 1 - rank, .relays = true}, "127.0.0.1"));
    }
    for (const Fd& rank : ranks)
      EXPECT_EQ(::recv(rank.get(), room.data(), kHelloBytes, MSG_WAITALL), ssize_t{kHelloBytes});
    EXPECT_EQ(relay.joined(), 1u);
  }

  void turn() {
    std::vector<pollfd> waits;
    relay.waitFor(waits);
    ::poll(waits.data(), waits.size(), 2);
    relay.ready(waits);
    relay.tick();
  }

  // A rank says all that there is room for on the way to the other one, which reads nothing. Returns how much.
  size_t fill(int rank) {
    size_t said = 0;
    for (int quiet = 0; quiet < 20; turn()) {
      const ssize_t count = ::send(ranks[rank].get(), room.data(), room.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      count > 0 ? said += count, quiet = 0 : ++quiet;
    }
    return said;
  }

  // Reads to the end. Returns how much, or nothing where the end does not come.
  std::optional<size_t> readAll(int rank) {
    size_t got = 0;
    for (const auto end = Clock::now() + kLong; Clock::now() < end; turn()) {
      ssize_t count = 0;
      while ((count = ::recv(ranks[rank].get(), room.data(), room.size(), MSG_DONTWAIT)) > 0)
        got += count;
      if (count == 0) return got;
    }
    return {};
  }

  Relay relay;
  std::array<Fd, 2> ranks;
  std::vector<std::byte> room = std::vector<std::byte>(8 * 1024);
};

TEST(TcpLastWords, ARelayPassesOnAllThatWasSaidBeforeTheEnd) {
  Relayed two;
  const size_t said = two.fill(0);
  ::shutdown(two.ranks[0].get(), SHUT_WR);
  // The other one goes on meanwhile, and the first does not read that. At last its connection is closed, so reset.
  for (int i = 0; i < 5; ++i, two.turn())
    ASSERT_EQ(::send(two.ranks[1].get(), two.room.data(), 100, MSG_NOSIGNAL), 100);
  EXPECT_EQ(two.readAll(1), said);
  two.ranks[0] = Fd();
  for (int i = 0; i < 5; ++i, two.turn())
    ASSERT_EQ(::send(two.ranks[1].get(), two.room.data(), 100, MSG_NOSIGNAL), 100);
  EXPECT_EQ(two.relay.joined(), 1u);
  two.ranks[1] = Fd();
  for (const auto end = Clock::now() + kLong; two.relay.joined() > 0 && Clock::now() < end;)
    two.turn();
  EXPECT_EQ(two.relay.joined(), 0u);
}

TEST(TcpLastWords, ARelayPassesOnWhatItHasOfAConnectionThatIsReset) {
  Relayed two;
  const size_t said = two.fill(0);
  int on_its_way = 1;
  // The relay's kernel has some of it yet, and takes the rest as the other rank reads.
  size_t read = 0;
  while (on_its_way > 0) {
    const ssize_t count = ::recv(two.ranks[1].get(), two.room.data(), two.room.size(), MSG_DONTWAIT);
    if (count > 0) read += count;
    two.turn();
    ASSERT_EQ(::ioctl(two.ranks[0].get(), SIOCOUTQ, &on_its_way), 0);
  }
  ASSERT_EQ(::send(two.ranks[1].get(), two.room.data(), 100, MSG_NOSIGNAL), 100);
  two.turn();
  two.ranks[0] = Fd();  // with bytes unread
  ASSERT_EQ(::send(two.ranks[1].get(), two.room.data(), 100, MSG_NOSIGNAL), 100);
  two.turn();
  const std::optional<size_t> rest = two.readAll(1);
  ASSERT_TRUE(rest);
  EXPECT_EQ(read + *rest, said);
}

// Takes what is written until it is broken; what the other end has said can be read also afterwards.
class BrokenPipe final : public Pipe {
 public:
  explicit BrokenPipe(Bytes said) : Pipe(Fd()), said_(std::move(said)) {}

  Moved read(std::span<std::byte> room, size_t& turn) override {
    if (!is_broken) return {};
    const size_t bytes = std::min({room.size(), said_.size() - read_, turn});
    std::copy_n(said_.begin() + static_cast<std::ptrdiff_t>(read_), bytes, room.begin());
    read_ += bytes;
    turn -= bytes;
    return bytes > 0 ? Moved{bytes} : Moved{0, "reset"};
  }
  Moved write(std::span<const iovec> parts) override {
    if (is_broken) return {0, "reset"};
    size_t bytes = 0;
    for (const iovec& part : parts)
      bytes += part.iov_len;
    return {bytes};
  }
  void expect(size_t) override {}

  bool is_broken = false;

 private:
  const Bytes said_;
  size_t read_ = 0;
};

TEST(TcpLastWords, ALinkReadsThemBeforeItTakesAConnectionForLost) {
  Link link({.rank = 0, .peer = 1, .incarnation = 1, .peer_incarnation = 2});
  const Bytes data = message(100, 1);
  const uint64_t sent = kRecordHeaderBytes + data.size();
  // That the first message was delivered, and then that the channel is at its end.
  Bytes said(2 * kPieceHeaderBytes + kRecordHeaderBytes);
  const std::span all(said);
  write(Piece{kRecordHeaderBytes, false, sent}, all.first<kPieceHeaderBytes>());
  write(Record{Record::Kind::delivered, 0, 0, 0}, all.subspan<kPieceHeaderBytes, kRecordHeaderBytes>());
  write(Piece{0, true, sent}, all.last<kPieceHeaderBytes>());
  auto owned = std::make_unique<BrokenPipe>(std::move(said));
  BrokenPipe& pipe = *owned;
  link.accept(std::move(owned), Hello{.from = 1, .to = 0, .incarnation = 2, .carries = true});
  ASSERT_EQ(link.connections(), 1u);

  const auto first = link.channel.send(3, data, 1);
  while (link.next())
    link.write();
  const auto second = link.channel.send(3, data, 2);
  pipe.is_broken = true;
  link.write();
  first->wait(1, kLong);
  try {
    second->wait(1, kLong);
    FAIL() << "the peer has ended the channel";
  } catch (const TransportError& error) {
    EXPECT_EQ(error.kind, Kind::closed);
    EXPECT_NE(std::string(error.what()).find("closed the channel"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace lowcomm::tcp
