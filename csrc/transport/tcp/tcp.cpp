#include "transport/tcp/tcp.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace lowcomm {
namespace {

using Kind = TransportError::Kind;
using std::chrono::milliseconds;
using tcp::Channel;
using tcp::Clock;
using tcp::Link;

class TcpTransfer final : public Transfer {
 public:
  TcpTransfer(int peer, std::shared_ptr<tcp::Delivery> delivery) : peer_(peer), delivery_(std::move(delivery)) {}
  void wait(milliseconds deadline) override { delivery_->wait(peer_, deadline); }

 private:
  const int peer_;
  const std::shared_ptr<tcp::Delivery> delivery_;
};

class TcpTransport final : public Transport {
 public:
  // `links`: by peer, the control channel and then the bulk ones; none to itself.
  TcpTransport(std::shared_ptr<tcp::Endpoint> endpoint, int rank, std::vector<std::vector<std::shared_ptr<Link>>> links)
      : endpoint_(std::move(endpoint)), rank_(rank), links_(std::move(links)) {}

  ~TcpTransport() override {
    cancel(Lane::control);
    cancel(Lane::bulk);
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(links_.size()); }

  std::unique_ptr<Transfer> isend(Lane lane, int peer, uint32_t tag, std::span<const std::byte> data) override {
    auto delivery = channel(lane, peer, tag).send(tag, data, endpoint_->takePlace());
    endpoint_->wake();
    return std::make_unique<TcpTransfer>(peer, std::move(delivery));
  }

  std::unique_ptr<Transfer> irecv(Lane lane, int peer, uint32_t tag, std::span<std::byte> data) override {
    return irecv(lane, peer, tag, data, nullptr);
  }

  std::unique_ptr<Transfer> irecv(Lane lane, int peer, uint32_t tag, std::span<std::byte> data,
                                  std::function<void()> then) override {
    auto delivery = channel(lane, peer, tag).receive(tag, data, std::move(then));
    if (delivery->came_early) endpoint_->wake();
    return std::make_unique<TcpTransfer>(peer, std::move(delivery));
  }

  void cancel(Lane lane) override {
    for (const auto& channels : links_) {
      for (size_t i = 0; i < channels.size(); ++i) {
        if ((i == 0) == (lane == Lane::control)) endpoint_->remove(channels[i]);
      }
    }
  }

  bool canCancelMessages() const override { return true; }

  void cancelMessages(Lane lane, int peer, uint32_t tag) override {
    Channel& of = channel(lane, peer, tag);
    for (tcp::Record word : of.cancel(tag)) {
      word.channel = number(lane, peer, tag);
      if (word.channel > 0) channel(Lane::control, peer, 0).say(word);
    }
    endpoint_->wake();
  }

  void closeTag(Lane lane, int peer, uint32_t tag) override {
    channel(lane, peer, tag).closeTag(tag);
    endpoint_->wake();
  }

  std::optional<uint32_t> unclaimed(Lane lane, int peer, uint32_t first, uint32_t end) override {
    std::optional<uint32_t> lowest;
    for (size_t i = 0; i < links_.at(peer).size(); ++i) {
      if ((i == 0) != (lane == Lane::control)) continue;
      const std::optional<uint32_t> tag = links_[peer][i]->channel.unclaimed(first);
      if (tag && *tag < lowest.value_or(end)) lowest = tag;
    }
    return lowest;
  }

  std::vector<ConnectionReport> report() const override {
    return endpoint_->locked([&] {
      std::vector<ConnectionReport> reports;
      for (const auto& channels : links_) {
        for (const auto& link : channels)
          reports.push_back(link->report());
      }
      return reports;
    });
  }

 private:
  Channel& channel(Lane lane, int peer, uint32_t tag) const {
    const auto& channels = links_.at(peer);
    if (channels.empty()) throw std::logic_error("tcp transport: expected another rank than " + std::to_string(peer));
    return channels[number(lane, peer, tag)]->channel;
  }

  uint32_t number(Lane lane, int peer, uint32_t tag) const {
    return lane == Lane::control ? 0 : 1 + tag % static_cast<uint32_t>(links_[peer].size() - 1);
  }

  const std::shared_ptr<tcp::Endpoint> endpoint_;
  const int rank_;
  const std::vector<std::vector<std::shared_ptr<Link>>> links_;
};

constexpr const char* kGroupKey = "lowcomm/tcp/group";

std::string keyOf(int rank) {
  return "lowcomm/tcp/" + std::to_string(rank);
}

// A number that nobody guesses, drawn by rank 0: it keeps those out who have no access to the rendezvous.
tcp::GroupId agreeOnGroup(Rendezvous& rendezvous, int rank, milliseconds timeout) {
  tcp::GroupId group;
  if (rank == 0) {
    std::random_device device;
    for (size_t i = 0; i < group.size(); i += sizeof(uint32_t)) {
      const uint32_t word = device();
      std::memcpy(group.data() + i, &word, sizeof(word));
    }
    rendezvous.set(kGroupKey, std::string(reinterpret_cast<const char*>(group.data()), group.size()));
    return group;
  }
  rendezvous.wait(kGroupKey, timeout);
  const std::string text = rendezvous.get(kGroupKey);
  if (text.size() != group.size()) {
    throw WireError(std::string(kGroupKey) + ": expected " + std::to_string(group.size()) + " bytes, got " +
                    std::to_string(text.size()));
  }
  std::memcpy(group.data(), text.data(), group.size());
  return group;
}

// While a group is being made.
class Expectation {
 public:
  Expectation(tcp::Endpoint& endpoint, const tcp::GroupId& group) : endpoint_(endpoint), group_(group) {
    endpoint_.expect(group_);
  }
  Expectation(const Expectation&) = delete;
  ~Expectation() { endpoint_.expectNoMore(group_); }

 private:
  tcp::Endpoint& endpoint_;
  const tcp::GroupId group_;
};

// How a process makes its connections.
std::string manner(const std::shared_ptr<tcp::Tls>& tls) {
  return tls ? "tls" : "plain";
}

// "incarnation manner address address …", as said at the rendezvous. Nothing of the secret but that there is one.
std::string introduction(const tcp::Endpoint& endpoint) {
  std::string text = std::to_string(endpoint.incarnation()) + " " + manner(endpoint.tls());
  for (const std::string& address : endpoint.addresses())
    text += " " + address;
  return text;
}

void hearIntroduction(tcp::Route& route, const std::string& text) {
  std::istringstream words(text);
  std::string manner;
  if (!(words >> route.peer_incarnation >> manner) || (manner != "tls" && manner != "plain"))
    throw WireError(keyOf(route.peer) + ": expected a number, 'tls' or 'plain', and addresses, got '" + text + "'");
  if (manner != lowcomm::manner(route.tls)) {
    throw TransportError(Kind::closed, route.peer,
                         std::string("expected LOWCOMM_SECRET or LOWCOMM_SECRET_FILE on all ranks or on none, got ") +
                             (route.tls ? "none there and one here" : "one there and none here"));
  }
  // Here, and not where it is dialled: a slow resolver would hold up all groups.
  for (std::string text; words >> text;) {
    for (const tcp::Address& address : tcp::resolve(text, "address of rank " + std::to_string(route.peer)))
      route.addresses.emplace_back(text, address);
  }
}

using Addresses = std::vector<std::pair<std::string, tcp::Address>>;

// The relay of two ranks that cannot reach each other: LOWCOMM_RELAY's, or the lowest other rank that can be reached.
Addresses relayOf(const std::string& named, const std::vector<Addresses>& of_ranks, int rank, int peer) {
  Addresses found;
  if (!named.empty()) {
    for (const tcp::Address& address : tcp::resolve(named, "LOWCOMM_RELAY"))
      found.emplace_back(named, address);
    return found;
  }
  for (int other = 0; other < static_cast<int>(of_ranks.size()) && found.empty(); ++other) {
    if (other != rank && other != peer) found = of_ranks[other];
  }
  return found;
}

// The higher of two ranks, but who cannot be reached in any case. `reachable`: this rank.
void decideWhoDials(tcp::Route& route, bool reachable) {
  const bool peer_reachable = !route.addresses.empty();
  if (!reachable && !peer_reachable && route.relays.empty()) {
    const int low = std::min(route.rank, route.peer), high = std::max(route.rank, route.peer);
    throw TransportError(Kind::closed, route.peer,
                         "expected a relay between ranks " + std::to_string(low) + " and " + std::to_string(high) +
                             ", which only dial (LOWCOMM_DIAL_ONLY=1), got no other rank that can be reached and no "
                             "LOWCOMM_RELAY");
  }
  route.dials = reachable == peer_reachable ? route.rank > route.peer : peer_reachable;
}

std::string joinedAddresses(const tcp::Route& route) {
  std::string text;
  for (const auto& [address, resolved] : route.addresses)
    text += (text.empty() ? "" : ", ") + address;
  return text;
}

// Of several peers that cannot be reached, one with another secret may be why the others have given up.
void expectOneSecret(tcp::Endpoint& endpoint, const std::vector<std::vector<std::shared_ptr<Link>>>& links) {
  for (const auto& channels : links) {
    for (const auto& link : channels) {
      if (endpoint.locked([&] { return link->hasOtherSecret(); }))
        throw TransportError(Kind::closed, link->route().peer, tcp::kOtherSecret);
    }
  }
}

}  // namespace

std::unique_ptr<Transport> connectTcp(Rendezvous& rendezvous, int rank, int size, int connections, milliseconds timeout,
                                      std::shared_ptr<tcp::Endpoint> endpoint) {
  const auto end = Clock::now() + timeout;
  const auto left = [&] {
    return std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(end - Clock::now()));
  };
  const tcp::GroupId group = agreeOnGroup(rendezvous, rank, timeout);
  const Expectation expectation(*endpoint, group);
  rendezvous.set(keyOf(rank), introduction(*endpoint));
  std::vector<tcp::Route> routes;
  std::vector<Addresses> addresses(size);
  for (int peer = 0; peer < size; ++peer) {
    routes.push_back({group, rank, peer, 0, endpoint->incarnation(), 0, {}, {}, endpoint->tls()});
    if (peer == rank) continue;
    rendezvous.wait(keyOf(peer), left());
    hearIntroduction(routes[peer], rendezvous.get(keyOf(peer)));
    addresses[peer] = routes[peer].addresses;
  }
  std::vector<std::vector<std::shared_ptr<Link>>> links(size);
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    tcp::Route& route = routes[peer];
    route.relays = relayOf(endpoint->relay(), addresses, rank, peer);
    decideWhoDials(route, /*reachable=*/!endpoint->addresses().empty());
    for (int channel = 0; channel <= connections; ++channel) {
      route.channel = static_cast<uint32_t>(channel);
      links[peer].push_back(std::make_shared<Link>(route));
    }
  }
  auto transport = std::make_unique<TcpTransport>(endpoint, rank, links);
  for (const auto& channels : links) {
    for (const auto& link : channels)
      endpoint->add(link);
  }
  for (const auto& channels : links) {
    for (const auto& link : channels) {
      while (!endpoint->locked([&] { return link->connections() > 0; })) {
        const bool over = link->channel.failed() || Clock::now() > end;
        if (over) expectOneSecret(*endpoint, links);
        if (link->channel.failed()) link->channel.send(0, {});  // throws why
        if (over) {
          throw TransportError(Kind::timed_out, link->route().peer,
                               "expected a connection within " + std::to_string(timeout.count()) + " ms, got none by " +
                                   joinedAddresses(link->route()));
        }
        std::this_thread::sleep_for(milliseconds(2));
      }
    }
  }
  return transport;
}

}  // namespace lowcomm
