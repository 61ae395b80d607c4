#include "transport/tcp/tunnel.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <thread>

#include "base/error.h"

namespace lowcomm::tcp {
namespace {

using std::chrono::milliseconds;

}  // namespace

GroupId tunnelGroup() {
  GroupId group;
  static_assert(sizeof(kTunnelGroup) - 1 == sizeof(group));
  std::memcpy(group.data(), kTunnelGroup, group.size());
  return group;
}

std::pair<Fd, uint16_t> listenOnLoopback() {
  auto [fd, port] = listenOn("127.0.0.1", "0", "store on the port");
  return {std::move(fd), static_cast<uint16_t>(std::stoi(port))};
}

// ---- exit ----

TunnelExit::TunnelExit(std::shared_ptr<Endpoint> endpoint, uint16_t port, size_t ranks)
    : endpoint_(std::move(endpoint)),
      port_(port),
      most_(kStreams + 8 * ranks),
      most_of_host_(kOfAHost + 4 * ranks),
      forwarder_(endpoint_, "") {
  endpoint_->withAdmission([this](Admission& admission) {
    admission.serve(tunnelGroup(), [this](const Hello& hello, const std::string& host) { return admit(hello, host); });
  });
}

TunnelExit::~TunnelExit() {
  endpoint_->withAdmission([](Admission& admission) { admission.serveNoMore(tunnelGroup()); });
}

// With the endpoint's lock, on its thread.
std::shared_ptr<Link> TunnelExit::admit(const Hello& hello, const std::string& host) {
  if (!host.empty() && !makeRoom(host)) return nullptr;
  Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_in server{};
  server.sin_family = AF_INET;
  server.sin_port = htons(port_);
  server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&server), sizeof(server)) != 0 && errno != EINPROGRESS)
    return nullptr;
  Route route;
  route.group = hello.group;
  route.peer = static_cast<int>(hello.from);
  route.channel = hello.channel;
  route.incarnation = endpoint_->incarnation();
  route.peer_incarnation = hello.incarnation;
  route.most_early = Forwarder::kMostEarly;
  route.patience = Forwarder::kWithoutConnection;
  auto link = std::make_shared<Link>(route);
  if (!host.empty()) clients_.push_back({host, link});
  forwarder_.add(std::move(socket), link);
  return link;
}

bool TunnelExit::makeRoom(const std::string& host) {
  clients_.remove_if([](const Client& one) {
    const auto link = one.link.lock();
    return !link || link->channel.failed();
  });
  const auto count = static_cast<size_t>(
      std::count_if(clients_.begin(), clients_.end(), [&](const Client& one) { return one.host == host; }));
  if (count < most_of_host_ && clients_.size() < most_) return true;
  const auto gone = std::find_if(clients_.begin(), clients_.end(), [&](const Client& one) {
    const auto link = one.link.lock();
    return (count < most_of_host_ || one.host == host) && link && !link->isConnected();
  });
  if (gone == clients_.end()) return false;
  gone->link.lock()->fail("it has no connection, and gave way to a later one");
  return true;
}

// ---- entry ----

TunnelEntry::TunnelEntry(std::shared_ptr<Endpoint> endpoint, std::string address, milliseconds timeout)
    : endpoint_(std::move(endpoint)), address_(std::move(address)), forwarder_(endpoint_, "the store at " + address_) {
  auto [listener, port] = listenOnLoopback();
  port_ = port;
  forwarder_.add(std::move(listener), dial(timeout), /*listens=*/true);
}

// Returns a link that is connected.
std::shared_ptr<Link> TunnelEntry::dial(milliseconds timeout) const {
  const auto end = Clock::now() + timeout;
  std::random_device device;
  Route route;
  route.group = tunnelGroup();
  route.rank = static_cast<int>(1 + device() % 0x7ffffffe);
  route.incarnation = endpoint_->incarnation();
  route.tls = endpoint_->tls();
  route.most_early = Forwarder::kMostEarly;
  route.patience = Forwarder::kWithoutConnection;
  route.dials = true;
  for (const Address& one : resolve(address_, "address of the store"))
    route.addresses.emplace_back(address_, one);
  std::string why = "no connection was made yet";
  while (Clock::now() < end) {
    const auto link = std::make_shared<Link>(route);
    endpoint_->add(link);
    while (Clock::now() < end && !link->channel.failed()) {
      if (endpoint_->locked([&] { return link->connections() > 0; })) return link;
      std::this_thread::sleep_for(milliseconds(2));
    }
    try {
      if (link->channel.failed()) link->channel.send(0, {});  // throws why
    } catch (const TransportError& error) {
      why = error.what();
    }
    endpoint_->remove(link);
    std::this_thread::sleep_for(milliseconds(20));
  }
  throw TransportError(
      TransportError::Kind::timed_out, 0,
      "expected a store at " + address_ + " within " + std::to_string(timeout.count()) + " ms, got none: " + why);
}

}  // namespace lowcomm::tcp
