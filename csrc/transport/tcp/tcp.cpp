#include "transport/tcp/tcp.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/tcp/pace.h"
#include "transport/tcp/ways.h"

namespace lowcomm {
namespace {

using Kind = TransportError::Kind;
using std::chrono::milliseconds;
using tcp::Clock;
using tcp::Link;
using tcp::MessageStream;

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
  TcpTransport(std::shared_ptr<tcp::Endpoint> endpoint, int rank, int size)
      : endpoint_(std::move(endpoint)), rank_(rank), links_(size) {}

  ~TcpTransport() override {
    cancel(Lane::control);
    cancel(Lane::bulk);
  }

  // Adds the next channel to the route's peer: first the control channel, then the bulk ones, which go its way.
  void add(tcp::Route route) {
    auto& channels = links_.at(route.peer);
    route.channel = static_cast<uint32_t>(channels.size());
    channels.push_back(std::make_shared<Link>(route));
    endpoint_->locked([&] { channels.back()->dialer().copyRoute(channels.front()->dialer()); });
    endpoint_->add(channels.back());
  }
  const std::vector<std::shared_ptr<Link>>& links(int peer) const { return links_[peer]; }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(links_.size()); }

  std::unique_ptr<Transfer> isend(Lane lane, int peer, uint32_t tag, std::span<const std::byte> data) override {
    return std::make_unique<TcpTransfer>(peer, endpoint_->send(channel(lane, peer, tag), tag, data));
  }

  std::unique_ptr<Transfer> irecv(Lane lane, int peer, uint32_t tag, std::span<std::byte> data) override {
    return std::make_unique<TcpTransfer>(peer, endpoint_->receive(channel(lane, peer, tag), tag, data));
  }

  void cancel(Lane lane) override {
    for (const auto& channels : links_) {
      for (size_t i = 0; i < channels.size(); ++i) {
        if ((i == 0) == (lane == Lane::control)) endpoint_->remove(channels[i]);
      }
    }
  }

  void acknowledge() override {
    const auto end = Clock::now() + milliseconds(100);  // for all peers together
    for (const auto& channels : links_) {
      for (const auto& link : channels) {
        const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
        link->channel.acknowledge(std::max(left, milliseconds(0)));
      }
    }
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
  MessageStream& channel(Lane lane, int peer, uint32_t tag) const {
    const auto& channels = links_.at(peer);
    if (channels.empty()) throw std::logic_error("tcp transport: expected another rank than " + std::to_string(peer));
    return channels[number(lane, peer, tag)]->channel;
  }

  uint32_t number(Lane lane, int peer, uint32_t tag) const {
    return lane == Lane::control ? 0 : 1 + tag % static_cast<uint32_t>(links_[peer].size() - 1);
  }

  const std::shared_ptr<tcp::Endpoint> endpoint_;
  const int rank_;
  std::vector<std::vector<std::shared_ptr<Link>>> links_;
};

constexpr const char* kGroupKey = "lowcomm/tcp/group";
constexpr uint32_t kConnectionsTag = 0xfffffffd;  // of the control channel: no op has it

std::string keyOf(int rank) {
  return "lowcomm/tcp/" + std::to_string(rank);
}

// A random number drawn by rank 0: it keeps out processes that have no access to the rendezvous.
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
  const std::string text = rendezvous.get(kGroupKey, timeout);
  if (text.size() != group.size()) {
    throw WireError(std::string(kGroupKey) + ": expected " + std::to_string(group.size()) + " bytes, got " +
                    std::to_string(text.size()));
  }
  std::memcpy(group.data(), text.data(), group.size());
  return group;
}

// How a process makes its connections.
std::string manner(const std::shared_ptr<tcp::Tls>& tls) {
  return tls ? "tls" : "plain";
}

constexpr const char *kLossBased = "loss", *kRateBased = "rate";

// "incarnation manner control address address …", as said at the rendezvous. Nothing of the secret but that there is
// one.
std::string introduction(const tcp::Endpoint& endpoint) {
  std::string text = std::to_string(endpoint.incarnation()) + " " + manner(endpoint.tls()) + " " +
                     (tcp::isLossBased() ? kLossBased : kRateBased);
  for (const std::string& address : endpoint.addresses())
    text += " " + address;
  return text;
}

// Returns whether the peer's congestion control is loss-based.
bool hearIntroduction(tcp::Route& route, const std::string& text) {
  std::istringstream words(text);
  std::string manner, control;
  const bool is_whole = static_cast<bool>(words >> route.peer_incarnation >> manner >> control);
  if (!is_whole || (manner != "tls" && manner != "plain") || (control != kLossBased && control != kRateBased)) {
    throw WireError(keyOf(route.peer) + ": expected a number, 'tls' or 'plain', '" + kLossBased + "' or '" +
                    kRateBased + "', and addresses, got '" + text + "'");
  }
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
  return control == kLossBased;
}

using tcp::Addresses;

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

// The higher rank dials, unless only one of the two is reachable: then the other one dials. `reachable`: this rank.
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

// Makes a group, step by step.
class GroupMaker {
 public:
  GroupMaker(Rendezvous& rendezvous, int rank, int size, int connections, milliseconds timeout,
             const std::shared_ptr<tcp::Endpoint>& endpoint)
      : rendezvous_(rendezvous),
        rank_(rank),
        size_(size),
        connections_(connections),
        timeout_(timeout),
        end_(Clock::now() + timeout),
        endpoint_(*endpoint),
        bulk_(size, std::max(connections, 1)),
        transport_(std::make_unique<TcpTransport>(endpoint, rank, size)) {}

  std::unique_ptr<Transport> run() {
    const tcp::GroupId group = agreeOnGroup(rendezvous_, rank_, timeout_);
    const tcp::Expectation expectation(endpoint_, group);
    introduce(group);
    for (const tcp::Route& route : routes_) {
      if (route.peer != rank_) transport_->add(route);
    }
    const size_t ways = std::ranges::count_if(endpoint_.addresses(), tcp::isWay);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && (isMeasured(peer) || hasWays(peer, ways))) waitFor(*transport_->links(peer)[0]);
    }
    // Two ranks have the same turn, and each rank has one in it at most, so that no two wait for each other.
    std::vector<tcp::Pair> pairs;
    for (int turn = 0; turn < size_; ++turn) {
      const int peer = (turn - rank_ + size_) % size_;
      if (peer == rank_ || !hasWays(peer, ways)) continue;
      pairs.push_back({routes_[peer], *transport_->links(peer)[0], routes_[peer].dials ? 0 : ways});
    }
    tcp::takeFastestWays(endpoint_, pairs, end_);
    countBulkChannels();
    for (tcp::Route& route : routes_) {
      route.is_one_of_several = connections_ == 0 && bulk_[route.peer] > 1;
      for (uint32_t i = 0; route.peer != rank_ && i < bulk_[route.peer]; ++i)
        transport_->add(route);
    }
    for (int peer = 0; peer < size_; ++peer) {
      for (const auto& link : transport_->links(peer))
        waitFor(*link);
    }
    return std::move(transport_);
  }

 private:
  void introduce(const tcp::GroupId& group) {
    rendezvous_.set(keyOf(rank_), introduction(endpoint_));
    std::vector<Addresses> addresses(size_);
    loss_based_.assign(size_, tcp::isLossBased());
    for (int peer = 0; peer < size_; ++peer) {
      routes_.push_back({group, rank_, peer, 0, endpoint_.incarnation(), 0, {}, {}, endpoint_.tls()});
      if (peer == rank_) continue;
      const std::string text = rendezvous_.get(keyOf(peer), tcp::left(end_));
      if (hearIntroduction(routes_[peer], text)) loss_based_[peer] = true;
      addresses[peer] = routes_[peer].addresses;
    }
    for (tcp::Route& route : routes_) {
      if (route.peer == rank_) continue;
      route.relays = relayOf(endpoint_.relay(), addresses, rank_, route.peer);
      decideWhoDials(route, /*reachable=*/!endpoint_.addresses().empty());
    }
  }

  // Whether the rank of the two that accepts has several ways; `own`: this one's.
  bool hasWays(int peer, size_t own) const {
    const auto is_way = [](const auto& address) { return tcp::isWay(address.first); };
    return (routes_[peer].dials ? std::ranges::count_if(routes_[peer].addresses, is_way)
                                : static_cast<std::ptrdiff_t>(own)) > 1;
  }

  // Whether the number of bulk channels depends on the round trip: the user gave no number, and one channel of BBR may
  // not suffice.
  bool isMeasured(int peer) const { return peer != rank_ && connections_ == 0 && (size_ > 2 || loss_based_[peer]); }

  // Sets `bulk_`. The lower of two ranks measures the round trip and decides.
  void countBulkChannels() {
    std::vector<std::shared_ptr<tcp::Delivery>> numbers(size_);
    for (int peer = 0; peer < size_; ++peer) {
      if (!isMeasured(peer)) continue;
      Link& control = *transport_->links(peer)[0];
      const auto number = std::as_writable_bytes(std::span(&bulk_[peer], 1));
      if (rank_ > peer) {
        numbers[peer] = endpoint_.receive(control.channel, kConnectionsTag, number);
        continue;
      }
      const ConnectionReport way = endpoint_.locked([&] { return control.report(); });
      // For a relayed connection the round trip is only the one to the relay, which joins few.
      bulk_[peer] = way.path == "direct" ? tcp::connectionsOver(way.least_round_trip_s, size_) : 1;
      numbers[peer] = endpoint_.send(control.channel, kConnectionsTag, number);
    }
    for (int peer = 0; peer < size_; ++peer) {
      if (numbers[peer]) tcp::waitFor(*numbers[peer], peer, end_);
      if (bulk_[peer] < 1 || bulk_[peer] > std::max<uint32_t>(connections_, tcp::kFarConnections)) {
        throw WireError("connections with rank " + std::to_string(peer) + ": expected 1 ... " +
                        std::to_string(tcp::kFarConnections) + ", got " + std::to_string(bulk_[peer]));
      }
    }
  }

  void waitFor(Link& link) const {
    while (!endpoint_.locked([&] { return link.connections() > 0; })) {
      const bool failed = link.channel.failed(), late = Clock::now() > end_;
      if (failed || late) expectOneSecret();
      if (failed) link.channel.send(0, {});  // throws why
      if (late) {
        throw TransportError(Kind::timed_out, link.route().peer,
                             "expected a connection within " + std::to_string(timeout_.count()) + " ms, got none by " +
                                 tcp::namesOf(link.route().addresses));
      }
      tcp::rest();
    }
  }

  // If several peers cannot be reached, one with another secret may be why the others have given up.
  void expectOneSecret() const {
    for (int peer = 0; peer < size_; ++peer) {
      for (const auto& link : transport_->links(peer)) {
        if (endpoint_.locked([&] { return link->dialer().hasOtherSecret(); }))
          throw TransportError(Kind::closed, peer, tcp::kOtherSecret);
      }
    }
  }

  Rendezvous& rendezvous_;
  const int rank_, size_, connections_;
  const milliseconds timeout_;
  const Clock::time_point end_;
  tcp::Endpoint& endpoint_;
  std::vector<uint32_t> bulk_;  // by peer: how many bulk channels; outlives the control channels that carry it
  std::unique_ptr<TcpTransport> transport_;
  std::vector<tcp::Route> routes_;  // by peer
  std::vector<bool> loss_based_;    // by peer: this rank's congestion control, or the peer's
};

}  // namespace

std::unique_ptr<Transport> connectTcp(Rendezvous& rendezvous, int rank, int size, int connections, milliseconds timeout,
                                      std::shared_ptr<tcp::Endpoint> endpoint) {
  return GroupMaker(rendezvous, rank, size, connections, timeout, endpoint).run();
}

}  // namespace lowcomm
