// The server side of a port: a tunnel's exit, a relay, and connections without a valid hello. The input is a sequence
// of acts, a byte each and its arguments: clients connect, send hellos, pieces and records with any fields without
// waiting for an answer, send any bytes, and close; the server behind the tunnel answers or closes. Afterwards the port
// must still answer a new client.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "target.h"
#include "transport/tcp/tunnel.h"

namespace {

using namespace lowcomm;
using tcp::Fd;

constexpr size_t kClients = 6;
constexpr int kDeadlineMs = 10'000;

struct Port {
  Port() : Port(tcp::listenOnLoopback()) {}
  explicit Port(std::pair<Fd, uint16_t> listener)
      : server(std::move(listener.first)),
        endpoint(std::make_shared<tcp::Endpoint>(tcp::EndpointOptions{.listen = "127.0.0.1:0", .relays_all = true})),
        exit(endpoint, listener.second, 0),
        address(tcp::resolve(endpoint->addresses()[0], "fuzz").front()) {}

  Fd dial() const {
    Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    fuzz::require(::connect(fd.get(), address.get(), address.size) == 0);
    return fd;
  }

  Fd server;
  std::shared_ptr<tcp::Endpoint> endpoint;
  tcp::TunnelExit exit;
  const tcp::Address address;
};

// What is left of the input; zeros behind its end.
struct Input {
  std::span<const uint8_t> left;
  uint64_t number(size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) {
      value = value << 8 | (left.empty() ? 0 : left.front());
      left = left.subspan(std::min<size_t>(1, left.size()));
    }
    return value;
  }
};

template <size_t size>
void say(const Fd& fd, const std::array<std::byte, size>& bytes) {
  ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

void sayHello(const Fd& fd, Input& input) {
  const uint64_t flags = input.number(1);
  tcp::Hello hello{.from = static_cast<uint32_t>(input.number(1)), .to = static_cast<uint32_t>(flags >> 6)};
  if (flags & 1) hello.group = tcp::tunnelGroup();
  hello.carries = flags & 2;
  hello.relays = flags & 4;
  hello.unknown = flags & 8;
  hello.received = flags & 16 ? input.number(8) : 0;
  hello.incarnation = flags >> 5 & 1;
  std::array<std::byte, tcp::kHelloBytes> bytes;
  tcp::write(hello, bytes);
  say(fd, bytes);
}

void sayPiece(const Fd& fd, Input& input) {
  std::array<std::byte, tcp::kPieceHeaderBytes> bytes;
  const uint64_t flags = input.number(1);
  tcp::write(tcp::Piece{static_cast<uint32_t>(input.number(flags & 4 ? 4 : 2)), (flags & 1) != 0,
                        flags & 8 ? input.number(8) : flags >> 4},
             bytes);
  say(fd, bytes);
}

void sayRecord(const Fd& fd, Input& input) {
  std::array<std::byte, tcp::kRecordHeaderBytes> bytes;
  const uint64_t kind = input.number(1);
  tcp::write(tcp::Record{static_cast<tcp::Record::Kind>(kind & 7), static_cast<uint32_t>(kind >> 6), input.number(1),
                         input.number(kind & 8 ? 8 : 2)},
             bytes);
  say(fd, bytes);
}

// A new client requests a group that this process has not; the endpoint must answer that it is unknown.
void requireAlive(const Port& port) {
  const Fd fd = port.dial();
  std::array<std::byte, tcp::kHelloBytes> bytes;
  tcp::write(tcp::Hello{.group = {std::byte{1}}, .from = 1}, bytes);
  say(fd, bytes);
  size_t have = 0;
  while (have < bytes.size()) {
    pollfd wait{fd.get(), POLLIN, 0};
    fuzz::require(::poll(&wait, 1, kDeadlineMs) == 1);
    const ssize_t count = ::recv(fd.get(), bytes.data() + have, bytes.size() - have, 0);
    fuzz::require(count > 0);
    have += count;
  }
  fuzz::require(tcp::parseHello(bytes).unknown);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Port* const port = new Port;  // its threads end with the process
  Input input{{data, size}};
  std::array<Fd, kClients> clients;
  std::vector<Fd> served;
  while (!input.left.empty()) {
    const uint64_t act = input.number(1);
    Fd& client = clients[(act >> 3) % kClients];
    if (!client) client = port->dial();
    switch (act & 7) {
      case 0:
        client = Fd();
        break;
      case 1:
        ::shutdown(client.get(), SHUT_WR);
        break;
      case 2:
        sayHello(client, input);
        break;
      case 3:
        sayPiece(client, input);
        break;
      case 4:
        sayRecord(client, input);
        break;
      case 5: {  // any bytes
        const uint64_t asked = input.number(1);
        const size_t bytes = std::min<size_t>(asked, input.left.size());
        ::send(client.get(), input.left.data(), bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        input.left = input.left.subspan(bytes);
        break;
      }
      case 6:  // the server behind the tunnel answers those who have come
        for (Fd fd; (fd = Fd(::accept4(port->server.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)));)
          served.push_back(std::move(fd));
        for (const Fd& fd : served)
          ::send(fd.get(), data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
        break;
      case 7:  // and hangs up
        served.clear();
        break;
    }
  }
  requireAlive(*port);
  while (Fd(::accept4(port->server.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC))) {
  }
  return 0;
}
