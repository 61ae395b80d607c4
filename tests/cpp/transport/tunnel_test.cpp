// Byte streams through a tunnel: in order and whole, over connections that are cut, ended by either socket.
#include "transport/tcp/tunnel.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "ranks_on_threads.h"
#include "transport/tcp_ranks.h"

namespace lowcomm::tcp {
namespace {

using namespace std::chrono_literals;
using test::holds;

// A server whose every connection is served by a function, on a thread of its own.
class Server {
 public:
  explicit Server(std::function<void(int)> serve) {
    auto [fd, port] = listenOnLoopback();
    listener_ = std::move(fd);
    port_ = port;
    thread_ = std::thread([this, serve] {
      while (true) {
        pollfd waits[] = {{listener_.get(), POLLIN, 0}};
        ::poll(waits, 1, 20);
        if (stop_) return;
        if (auto one = std::make_shared<Fd>(::accept(listener_.get(), nullptr, nullptr)); *one)
          threads_.emplace_back([serve, one] { serve(one->get()); });
      }
    });
  }
  ~Server() {
    stop_ = true;
    thread_.join();
    for (std::thread& thread : threads_)
      thread.join();
  }
  uint16_t port() const { return port_; }

 private:
  Fd listener_;
  uint16_t port_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;
  std::vector<std::thread> threads_;  // of thread_
};

void echo(int fd) {
  std::vector<char> bytes(100'000);
  for (ssize_t count; (count = ::recv(fd, bytes.data(), bytes.size(), 0)) > 0;)
    if (::send(fd, bytes.data(), count, MSG_NOSIGNAL) != count) return;
}

Fd connectTo(uint16_t port) {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  const timeval most{kLong.count() / 1000, 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &most, sizeof(most));
  ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &most, sizeof(most));
  return fd;
}

void sendAll(int fd, const std::string& bytes) {
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t count = ::send(fd, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
    ASSERT_GT(count, 0);
    at += count;
  }
}

// So many bytes, or what comes before the end.
std::string receive(int fd, size_t bytes) {
  std::string got(bytes, 0);
  size_t have = 0;
  while (have < bytes) {
    const ssize_t count = ::recv(fd, got.data() + have, bytes - have, 0);
    if (count <= 0) break;
    have += count;
  }
  got.resize(have);
  return got;
}

std::string text(size_t bytes, unsigned seed) {
  const Bytes made = message(bytes, seed);
  return {reinterpret_cast<const char*>(made.data()), made.size()};
}

void waitFor(const std::atomic<bool>& event) {
  const auto until = Clock::now() + kLong;
  while (!event && Clock::now() < until)
    std::this_thread::sleep_for(5ms);
}

struct Tunnelled {
  explicit Tunnelled(std::function<void(int)> serve = echo, const std::optional<Secret>& secret = {})
      : server(std::move(serve)),
        mine(std::make_shared<Endpoint>(onLoopback(secret))),
        theirs(std::make_shared<Endpoint>(onLoopback(secret))),
        exit(std::make_unique<TunnelExit>(mine, server.port(), 2)) {}

  std::unique_ptr<TunnelEntry> enter(milliseconds timeout = kLong) const {
    return std::make_unique<TunnelEntry>(theirs, mine->addresses()[0], timeout);
  }

  Server server;
  std::shared_ptr<Endpoint> mine, theirs;
  std::unique_ptr<TunnelExit> exit;
};

// A connection to the server.
struct Client {
  explicit Client(const Tunnelled& tunnel) : entry(tunnel.enter()), fd(connectTo(entry->port())) {}
  int get() const { return fd.get(); }
  std::unique_ptr<TunnelEntry> entry;
  Fd fd;
};

class TunnelOf : public SecretOrNot {};

INSTANTIATE_TEST_SUITE_P(Tcp, TunnelOf, secretOrNot(), secretName);

TEST_P(TunnelOf, BytesComeInOrderAndConnectionsThatAreCutLoseNone) {
  Tunnelled tunnel(echo, secret());
  const Client fd(tunnel);
  for (unsigned round = 0; round < 30; ++round) {
    const std::string said = text(1 + round * round * 1000, round);
    std::thread sends([&] { sendAll(fd.get(), said); });
    if (round % 3 == 1) tunnel.mine->cut();
    if (round % 3 == 2) tunnel.theirs->cut();
    EXPECT_TRUE(receive(fd.get(), said.size()) == said) << round;
    sends.join();
  }
}

TEST(Tunnel, ManyStreamsHaveTheirOwnBytes) {
  Tunnelled tunnel;
  test::sideBySide(8, [&](int k) {
    const Client fd(tunnel);
    for (unsigned i = 0; i < 20; ++i) {
      const std::string said = text(20'000 * i + 1, 100 * k + i);
      std::thread sends([&] { sendAll(fd.get(), said); });
      EXPECT_TRUE(receive(fd.get(), said.size()) == said) << k << " " << i;
      sends.join();
    }
  });
}

TEST(Tunnel, TheEndOfASocketEndsTheOtherOnceAllHasCome) {
  const std::string said = text(3'000'000, 1);
  std::atomic<bool> all{false};
  Tunnelled tunnel([&](int fd) {
    sendAll(fd, receive(fd, 1));
    all = receive(fd, said.size() + 1) == said;
  });
  {
    Client fd(tunnel);
    sendAll(fd.get(), "x");
    EXPECT_EQ(receive(fd.get(), 1), "x");  // of a socket that is closed nobody can tell whose it was
    sendAll(fd.get(), said);
    fd.fd = Fd();
    waitFor(all);
  }
  EXPECT_TRUE(all) << "the server reads all and then the end";
  Tunnelled back([&](int fd) { sendAll(fd, said); });
  const Client fd(back);
  EXPECT_TRUE(receive(fd.get(), said.size() + 1) == said) << "the client reads all and then the end";
}

// One that takes nothing keeps its server from saying more, and no process holds more than it may.
TEST(Tunnel, WhoDoesNotReadHoldsTheOtherBack) {
  std::atomic<size_t> sent{0};
  std::atomic<bool> is_held{false};
  Tunnelled tunnel([&](int fd) {
    const std::string part(1 << 20, 'x');
    const timeval soon{0, 500'000};
    ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &soon, sizeof(soon));
    for (ssize_t count; (count = ::send(fd, part.data(), part.size(), MSG_NOSIGNAL)) > 0 && sent < (64 << 20);)
      sent += count;
    is_held = true;
  });
  const Client fd(tunnel);
  waitFor(is_held);
  EXPECT_TRUE(is_held);
  EXPECT_LT(sent, size_t{32} << 20) << "beyond what the kernel's buffers take";
}

TEST(Tunnel, AServerThatComesLaterIsFound) {
  Server server(echo);
  const auto mine = std::make_shared<Endpoint>(onLoopback()), theirs = std::make_shared<Endpoint>(onLoopback());
  std::unique_ptr<TunnelExit> exit;
  std::thread starts([&] {
    std::this_thread::sleep_for(300ms);
    exit = std::make_unique<TunnelExit>(mine, server.port(), 2);
  });
  TunnelEntry entry(theirs, mine->addresses()[0], kLong);  // the port is there before the exit is
  starts.join();
  const Fd fd = connectTo(entry.port());
  sendAll(fd.get(), "hello");
  EXPECT_EQ(receive(fd.get(), 5), "hello");
}

TEST(Tunnel, NobodyThereIsNamed) {
  const auto enter = [] { TunnelEntry entry(std::make_shared<Endpoint>(onLoopback()), "127.0.0.1:1", 200ms); };
  EXPECT_TRUE(holds(test::thrownBy<TransportError>(enter), {"expected a store at 127.0.0.1:1", "200 ms"}));
}

TEST(Tunnel, AnExitThatEndsEndsItsStreams) {
  Tunnelled tunnel;
  const Client fd(tunnel);
  sendAll(fd.get(), "hello");
  EXPECT_EQ(receive(fd.get(), 5), "hello");
  tunnel.exit.reset();
  EXPECT_EQ(receive(fd.get(), 1), "");
  EXPECT_THROW(tunnel.enter(200ms), TransportError);
}

TEST(Tunnel, AnEndpointHasOneExit) {
  Tunnelled tunnel;
  EXPECT_THROW(TunnelExit(tunnel.mine, tunnel.server.port(), 2), ValueError);
}

// Other processes of the machine, of other users too, see the entry's port.
TEST(Tunnel, OtherProcessesOfTheMachineAreHungUpOn) {
  Tunnelled tunnel;
  const auto entry = tunnel.enter();
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(entry->port());
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const pid_t child = ::fork();
  if (child == 0) {  // nothing here that takes a lock
    ::alarm(60);
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    char byte = 'x';
    if (::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0) ::_exit(2);
    [[maybe_unused]] const ssize_t said = ::send(fd, &byte, 1, MSG_NOSIGNAL);
    ::_exit(::recv(fd, &byte, 1, 0) > 0 ? 1 : 0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "1 << 8: it was served; 2 << 8: it could not connect; 14: it was not hung up on";
  const Fd fd = connectTo(entry->port());
  sendAll(fd.get(), "hello");
  EXPECT_EQ(receive(fd.get(), 5), "hello") << "and its own process is served";
}

}  // namespace
}  // namespace lowcomm::tcp
