#include "transport/tcp/ways.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>

#include "base/process.h"
#include "base/signals.h"

namespace lowcomm::tcp {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

constexpr uint32_t kFirstChannel = 1U << 16;  // of the ways: a group has none so high
constexpr uint32_t kDecided = 0xffffffff;     // a tag of the control channel: no op has it
constexpr size_t kFirstBytes = 32 << 10;      // in which TCP finds the link's rate, more or less
constexpr size_t kTimedBytes = 128 << 10;
constexpr auto kPatience = 300ms;
constexpr auto kLongest = 5s;  // of a message: a way that connects and drops large packets is none
constexpr double kTimesAsFast = 1.5;
constexpr double kNever = std::numeric_limits<double>::infinity();

std::string hostOf(const std::string& address) {
  return address.substr(0, address.rfind(':'));
}

milliseconds left(Clock::time_point end) {
  return std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(end - Clock::now()));
}

// The channels of the ways, which end with this.
class Channels {
 public:
  explicit Channels(Endpoint& endpoint) : endpoint_(endpoint) {}
  Channels(const Channels&) = delete;
  ~Channels() {
    for (const auto& link : links_) {
      if (link) endpoint_.remove(link);
    }
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
      const auto sent = link.channel.send(static_cast<uint32_t>(size), bytes.first(size), endpoint.takePlace());
      endpoint.wake();
      sent->wait(link.route().peer, left(end));
    }
  } catch (const TransportError&) {
    return kNever;
  }
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Measures the seconds of a message by each way; kNever where it does not arrive.
std::vector<double> measure(Endpoint& endpoint, const Route& route, const Addresses& ways, Link& control,
                            Clock::time_point end) {
  const std::vector<std::byte> bytes(kTimedBytes);
  Channels channels(endpoint);
  std::ptrdiff_t dialled = 0;
  const auto& own = endpoint.addresses();
  for (const auto& way : ways) {
    // An address that this machine has too, as that of a container bridge, leads to itself.
    const bool is_own = std::ranges::any_of(own, [&](const auto& one) { return hostOf(one) == hostOf(way.first); });
    is_own ? channels.skip() : (++dialled, void(channels.add(route, {way})));
  }
  const double round_trip_s = endpoint.locked([&] { return control.report().least_round_trip_s; });
  const auto until = std::min(end, Clock::now() + kPatience + milliseconds(static_cast<int64_t>(4000 * round_trip_s)));
  std::vector<Link*> found = channels.connected();
  const auto count = [&] { return std::ssize(found) - std::count(found.begin(), found.end(), nullptr); };
  while (count() < dialled && Clock::now() < until) {
    runSignalHandlers();
    std::this_thread::sleep_for(milliseconds(2));
    found = channels.connected();
  }
  std::vector<double> seconds;
  for (Link* link : found) {
    const auto longest = std::min(end, Clock::now() + kLongest);
    seconds.push_back(!link ? kNever : count() == 1 ? 0 : timeOf(endpoint, *link, bytes, longest));
  }
  return seconds;
}

// The way that this process has chosen, by the incarnation of the peer's process; "" keeps the order of addresses.
std::mutex known_mutex;
std::map<uint64_t, std::string> known;

// Returns the address of the fastest way; "" keeps the order of addresses.
std::string fastest(Endpoint& endpoint, const Route& route, Link& control, Clock::time_point end) {
  Addresses ways;
  std::ranges::copy_if(route.addresses, std::back_inserter(ways), [](const auto& one) { return isWay(one.first); });
  const std::vector<double> seconds = measure(endpoint, route, ways, control, end);
  const auto first = std::find_if(seconds.begin(), seconds.end(), [](double s) { return s < kNever; });
  if (first == seconds.end()) return "";
  const auto best = std::min_element(seconds.begin(), seconds.end());
  if (*first <= kTimesAsFast * *best) return ways[first - seconds.begin()].first;
  const std::string& taken = ways[best - seconds.begin()].first;
  char times[32];
  std::snprintf(times, sizeof(times), "%.1f", *first / *best);
  logLine("rank " + std::to_string(route.peer) + " is reached by " + taken + ", " + times + " times as fast as " +
          ways[first - seconds.begin()].first);
  return taken;
}

}  // namespace

bool isWay(const std::string& address) {
  in_addr number{};
  return ::inet_pton(AF_INET, hostOf(address).c_str(), &number) == 1 && ntohl(number.s_addr) >> 24 != IN_LOOPBACKNET;
}

void takeFastestWay(Endpoint& endpoint, Route& route, Link& control, Clock::time_point end) {
  std::unique_lock lock(known_mutex);
  auto found = known.find(route.peer_incarnation);
  if (found == known.end()) {
    lock.unlock();
    const bool direct = endpoint.locked([&] { return control.report().path; }) == "direct";
    const std::string taken = direct ? fastest(endpoint, route, control, end) : "";
    lock.lock();
    found = known.insert_or_assign(route.peer_incarnation, taken).first;
  }
  const std::string taken = found->second;
  lock.unlock();
  std::stable_partition(route.addresses.begin(), route.addresses.end(),
                        [&](const auto& address) { return address.first == taken; });
  // Empty: the control channel may outlive a wait that an error ends, and the memory of what it waits for.
  const auto sent = control.channel.send(kDecided, {}, endpoint.takePlace());
  endpoint.wake();
  sent->wait(route.peer, left(end));
}

void offerWays(Endpoint& endpoint, const Route& route, size_t ways, Link& control, Clock::time_point end) {
  std::vector<std::byte> room(ways * kTimedBytes);
  Channels channels(endpoint);  // which touch the room no more when they have ended
  for (size_t way = 0; way < ways; ++way) {
    Link& link = channels.add(route, {});
    const auto here = std::span(room).subspan(way * kTimedBytes, kTimedBytes);
    for (const size_t size : {kFirstBytes, kTimedBytes})
      link.channel.receive(static_cast<uint32_t>(size), here.first(size));
  }
  const auto decided = control.channel.receive(kDecided, {});
  if (decided->came_early) endpoint.wake();
  while (!decided->ended() && Clock::now() < end) {
    runSignalHandlers();
    std::this_thread::sleep_for(milliseconds(2));
  }
  decided->wait(route.peer, left(end));
}

}  // namespace lowcomm::tcp
