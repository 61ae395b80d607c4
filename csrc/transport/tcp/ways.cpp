#include "transport/tcp/ways.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "base/process.h"

namespace lowcomm::tcp {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

constexpr uint32_t kFirstChannel = 1U << 16;  // of the ways: a group has none so high
constexpr uint32_t kDecided = 0xffffffff;     // tags of the control channel: no op has them
constexpr uint32_t kReady = 0xfffffffe;
constexpr size_t kFirstBytes = 32 << 10;  // in which TCP finds the link's rate, more or less
constexpr size_t kTimedBytes = 128 << 10;
constexpr auto kPatience = 300ms, kPatienceAPair = 20ms;  // a port admits a few at a time (Strangers)
constexpr auto kLongest = 5s;  // of a message: a way that connects and drops large packets is none
constexpr double kTimesAsFast = 1.5;
constexpr double kNever = std::numeric_limits<double>::infinity();

std::string hostOf(const std::string& address) {
  return address.substr(0, address.rfind(':'));
}

// The channels of the ways, which end with this.
class Channels {
 public:
  explicit Channels(Endpoint& endpoint) : endpoint_(endpoint) {}
  Channels(const Channels&) = delete;
  ~Channels() { end(); }

  void end() {
    for (const auto& link : links_) {
      if (link) endpoint_.remove(link);
    }
    links_.clear();
  }

  // The next one: by `addresses` if this rank dials, else whichever way the other comes.
  Link& add(Route route, Addresses addresses) {
    route.channel = kFirstChannel + static_cast<uint32_t>(links_.size());
    route.dials = !addresses.empty();
    route.addresses = std::move(addresses);
    route.relays.clear();
    links_.push_back(std::make_shared<Link>(std::move(route)));
    endpoint_.add(links_.back());
    return *links_.back();
  }
  void skip() { links_.emplace_back(); }

  // Those that are connected; null where one is not.
  std::vector<Link*> connected() const {
    return endpoint_.locked([&] {
      std::vector<Link*> found;
      for (const auto& link : links_)
        found.push_back(link && link->isConnected() ? link.get() : nullptr);
      return found;
    });
  }

 private:
  Endpoint& endpoint_;
  std::vector<std::shared_ptr<Link>> links_;
};

// Seconds of a message over a channel, which may read `bytes` until it ends.
double timeOf(Endpoint& endpoint, Link& link, std::span<const std::byte> bytes, Clock::time_point end) {
  Clock::time_point begin;
  try {
    for (const size_t size : {kFirstBytes, kTimedBytes}) {
      begin = Clock::now();
      endpoint.send(link.channel, static_cast<uint32_t>(size), bytes.first(size))->wait(link.route().peer, left(end));
    }
  } catch (const TransportError&) {
    return kNever;
  }
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The way that this process has chosen, by the incarnation of the peer's process; "" keeps the order of addresses.
std::mutex known_mutex;
std::map<uint64_t, std::string> known;

// The part of this rank in a pair, in the order of the functions.
class Comparison {
 public:
  // `pairs`: how many there are. `room`: for a message that is timed, and is not read.
  Comparison(Endpoint& endpoint, const Pair& pair, size_t pairs, Clock::time_point end, std::span<std::byte> room)
      : endpoint_(endpoint), pair_(pair), end_(end), channels_(endpoint) {
    if (pair.offered > 0) {
      offer(room);
      return;
    }
    for (auto& ready : ready_)
      ready = endpoint.receive(pair.control.channel, kReady, {});
    std::ranges::copy_if(pair.route.addresses, std::back_inserter(ways_),
                         [](const auto& one) { return isWay(one.first); });
    const ConnectionReport report = endpoint.locked([&] { return pair_.control.report(); });
    patience_ =
        kPatience + pairs * kPatienceAPair + milliseconds(static_cast<int64_t>(4e3 * report.least_round_trip_s));
    std::unique_lock lock(known_mutex);
    const auto found = known.find(pair.route.peer_incarnation);
    const bool is_known = found != known.end();
    const std::string taken = is_known ? found->second : "";
    lock.unlock();
    if (is_known || report.path != "direct") decide(taken);
  }

  // Returns whether it is known which ways connect. The dialling rank dials once the other one is ready.
  bool hasConnected() {
    if (decided_) return true;
    if (!until_) {
      if (!ready_[0]->ended()) return false;
      dial();
    }
    connected_ = channels_.connected();
    return count() == dialled_ || Clock::now() >= *until_;
  }

  // If there is nothing to time, the other rank need not wait for the pair's turn.
  void decideWithoutTiming() {
    if (decided_ || count() > 1) return;
    const auto only = std::ranges::find_if(connected_, [](const Link* link) { return link != nullptr; });
    decide(only == connected_.end() ? "" : ways_[only - connected_.begin()].first);
  }

  void takeTurn() {
    if (pair_.offered > 0)
      tell(kReady);
    else
      waitFor(*ready_[1], pair_.route.peer, end_);
    if (!decided_) decide(fastest());
    waitFor(*decided_, pair_.route.peer, end_);
    channels_.end();
  }

 private:
  void offer(std::span<std::byte> room) {
    for (size_t way = 0; way < pair_.offered; ++way) {
      Link& link = channels_.add(pair_.route, {});
      for (const size_t size : {kFirstBytes, kTimedBytes})
        link.channel.receive(static_cast<uint32_t>(size), room.first(size));
    }
    decided_ = endpoint_.receive(pair_.control.channel, kDecided, {});
    tell(kReady);
  }

  // Empty: the control channel may outlive a wait that an error ends, and the memory of what it waits for.
  std::shared_ptr<Delivery> tell(uint32_t tag) { return endpoint_.send(pair_.control.channel, tag, {}); }

  std::ptrdiff_t count() const {
    return std::ranges::count_if(connected_, [](const Link* link) { return link; });
  }

  void dial() {
    const auto& own = endpoint_.addresses();
    for (const auto& way : ways_) {
      // An address that this machine has too, as that of a container bridge, leads to itself.
      const bool is_own = std::ranges::any_of(own, [&](const auto& one) { return hostOf(one) == hostOf(way.first); });
      is_own ? channels_.skip() : (++dialled_, void(channels_.add(pair_.route, {way})));
    }
    until_ = std::min(end_, Clock::now() + patience_);
  }

  // Returns the address of the fastest way.
  std::string fastest() {
    const std::vector<std::byte> bytes(kTimedBytes);
    std::vector<double> seconds;
    for (Link* link : connected_)
      seconds.push_back(link ? timeOf(endpoint_, *link, bytes, std::min(end_, Clock::now() + kLongest)) : kNever);
    const auto first = std::ranges::find_if(seconds, [](double s) { return s < kNever; });
    if (first == seconds.end()) return "";
    const std::string& usual = ways_[first - seconds.begin()].first;
    const auto best = std::ranges::min_element(seconds);
    if (*first <= kTimesAsFast * *best) return usual;
    const std::string& taken = ways_[best - seconds.begin()].first;
    char times[32];
    std::snprintf(times, sizeof(times), "%.1f", *first / *best);
    logLine("rank " + std::to_string(pair_.route.peer) + " is reached by " + taken + ", " + times +
            " times as fast as " + usual);
    return taken;
  }

  void decide(const std::string& taken) {
    std::ranges::stable_partition(pair_.route.addresses, [&](const auto& address) { return address.first == taken; });
    decided_ = tell(kDecided);
    std::lock_guard lock(known_mutex);
    known.insert_or_assign(pair_.route.peer_incarnation, taken);
  }

  Endpoint& endpoint_;
  const Pair pair_;
  const Clock::time_point end_;
  Addresses ways_;
  milliseconds patience_{};
  std::array<std::shared_ptr<Delivery>, 2> ready_;  // the other rank's ways are open; it is the pair's turn
  std::shared_ptr<Delivery> decided_;               // null: this rank is to decide
  Channels channels_;
  std::ptrdiff_t dialled_ = 0;
  std::optional<Clock::time_point> until_;  // empty: not dialled yet
  std::vector<Link*> connected_;            // by way; null where it is not
};

}  // namespace

bool isWay(const std::string& address) {
  in_addr number{};
  return ::inet_pton(AF_INET, hostOf(address).c_str(), &number) == 1 && ntohl(number.s_addr) >> 24 != IN_LOOPBACKNET;
}

void takeFastestWays(Endpoint& endpoint, const std::vector<Pair>& pairs, Clock::time_point end) {
  std::vector<std::byte> room(kTimedBytes);  // outlives the channels
  std::vector<std::unique_ptr<Comparison>> comparisons;
  for (const Pair& pair : pairs)
    comparisons.push_back(std::make_unique<Comparison>(endpoint, pair, pairs.size(), end, room));
  const auto waits = [](const auto& one) { return !one->hasConnected(); };
  while (std::ranges::count_if(comparisons, waits) > 0 && Clock::now() < end)
    rest();
  for (const auto& one : comparisons)
    one->decideWithoutTiming();
  for (const auto& one : comparisons)
    one->takeTurn();
}

}  // namespace lowcomm::tcp
