#include "transport/tcp/admission.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "base/error.h"

namespace lowcomm::tcp {
namespace {

using namespace std::chrono_literals;

constexpr size_t kAcceptsATurn = 8;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

bool flagFromEnv(const char* name) {
  const std::string text = variable(name);
  if (text != "" && text != "0" && text != "1")
    throw ValueError(std::string(name) + ": expected 0 or 1, got '" + text + "'");
  return text == "1";
}

// A port that several processes of a machine are given counts from LOCAL_RANK.
std::string withLocalRank(const char* name) {
  const std::string text = variable(name);
  if (text.empty()) return text;
  const auto [host, port] = hostAndPort(text, name);
  char* end = nullptr;
  const long number = std::strtol(port.c_str(), &end, 10);
  const long rank = std::strtol(variable("LOCAL_RANK").c_str(), nullptr, 10);
  if (*end != '\0' || number < 0 || number + rank > 65535) {
    throw ValueError(std::string(name) + ": expected a port of 0 ... 65535, LOCAL_RANK included, got '" + text + "'");
  }
  return joined(host, std::to_string(number == 0 ? 0 : number + rank));
}

}  // namespace

EndpointOptions EndpointOptions::fromEnvironment() {
  EndpointOptions options{withLocalRank("LOWCOMM_LISTEN"),
                          withLocalRank("LOWCOMM_ADVERTISE"),
                          variable("LOWCOMM_SOCKET_IFNAME"),
                          variable("LOWCOMM_RATE"),
                          flagFromEnv("LOWCOMM_DIAL_ONLY"),
                          variable("LOWCOMM_RELAY"),
                          false,
                          Secret::fromEnvironment()};
  if (options.interface.empty()) {
    const std::string names = variable("GLOO_SOCKET_IFNAME");  // gloo takes several
    options.interface = names.substr(0, names.find(','));
  }
  if (options.dials_only && !(options.listen.empty() && options.advertise.empty()))
    throw ValueError("LOWCOMM_DIAL_ONLY: expected no LOWCOMM_LISTEN and no LOWCOMM_ADVERTISE beside it, got one");
  return options;
}

Admission::Admission(std::vector<std::shared_ptr<Link>>& links, const EndpointOptions& options,
                     std::shared_ptr<Tls> tls, uint64_t incarnation)
    : links_(links), tls_(std::move(tls)), incarnation_(incarnation), relays_all_(options.relays_all) {
  strangers_.emplace(options.dials_only ? "none" : listen(options), tls_, incarnation_);
}

// Returns the port.
std::string Admission::listen(const EndpointOptions& options) {
  std::string host, port = "0";
  if (!options.listen.empty()) std::tie(host, port) = hostAndPort(options.listen, "LOWCOMM_LISTEN");
  std::vector<std::string> hosts = host.empty() ? localHosts(options.interface) : std::vector<std::string>{host};
  if (host.empty() && !options.interface.empty()) host = hosts.front();
  std::tie(listener_, port) = listenOn(host, port, "LOWCOMM_LISTEN");
  if (!options.advertise.empty()) {
    addresses_ = {options.advertise};
  } else {
    for (const std::string& one : hosts)
      addresses_.push_back(joined(one, port));
  }
  return port;
}

void Admission::serve(const GroupId& group, Admit admit) {
  if (!served_.emplace(group, std::move(admit)).second)
    throw ValueError("a store on the port: expected one in a process, got another");
}

void Admission::waitFor(std::vector<pollfd>& waits) {
  waits.push_back({Clock::now() < accept_at_ ? -1 : listener_.get(), POLLIN, 0});
  strangers_->waitFor(waits);
  strangers_waited_for_ = strangers_->size();
  relay_.waitFor(waits);
}

void Admission::ready(std::span<const pollfd> waits) {
  const auto of_strangers = waits.subspan(1, strangers_waited_for_);
  relay_.ready(waits.subspan(1 + strangers_waited_for_));
  Strangers::PendingHello heard = strangers_->hear(of_strangers);
  for (Introduction& one : heard.introductions)
    introduce(one);
  for (const Identity& identity : heard.other_secrets) {
    if (Link* link = linkTo(identity.group, identity.from, identity.to, identity.channel))
      link->dialer().noteOtherSecret();
  }
  if (waits[0].revents && heard.all) acceptSome();
}

void Admission::tick() {
  strangers_->report();
  relay_.tick();
}

void Admission::clear() {
  strangers_->clear();
  relay_.clear();
}

// No more than can be heard soon: who has said something already would have to give way to who has not.
void Admission::acceptSome() {
  for (size_t i = 0; i < kAcceptsATurn; ++i) {
    Address from;
    from.size = sizeof(from.storage);
    Fd fd(::accept4(listener_.get(), from.get(), &from.size, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) {
      // No descriptor may be left: the connections that wait are accepted later.
      if (errno != EAGAIN && errno != ECONNABORTED && errno != EINTR) accept_at_ = Clock::now() + 100ms;
      return;
    }
    strangers_->admit(std::move(fd), from);
  }
}

Link* Admission::linkTo(const GroupId& group, uint32_t from, uint32_t to, uint32_t channel) const {
  for (const auto& link : links_) {
    const Route& route = link->route();
    if (route.group == group && route.channel == channel && route.peer == static_cast<int>(from) &&
        route.rank == static_cast<int>(to))
      return link.get();
  }
  return nullptr;
}

// Whether a request to the relay is a member's. Without a secret that is a rank of a group of this process, which knows
// its process's number, and asks for another one.
bool Admission::mayBeRelayed(const Introduction& one) const {
  const Hello& hello = one.hello;
  if (tls_ && !tls_->isRelayCode(hello, one.code)) return false;
  if (relays_all_) return true;
  const auto has = [&](uint32_t rank, const uint64_t* incarnation) {
    return std::any_of(links_.begin(), links_.end(), [&](const auto& link) {
      const Route& route = link->route();
      return route.group == hello.group && route.peer == static_cast<int>(rank) &&
             (!incarnation || route.peer_incarnation == *incarnation);
    });
  };
  return !served_.contains(hello.group) && has(hello.from, &hello.incarnation) && has(hello.to, nullptr);
}

void Admission::introduce(Introduction& one) {
  const Hello& hello = one.hello;
  const bool is_expected = std::find(expected_.begin(), expected_.end(), hello.group) != expected_.end();
  if (hello.relays) {
    if (!mayBeRelayed(one)) return is_expected ? void() : strangers_->count(Strangers::Kind::unknown);
    if (!relay_.admit(one.pipe->release(), hello, tls_ ? "" : one.host)) strangers_->count(Strangers::Kind::crowded);
    return;
  }
  Link* link = linkTo(hello.group, hello.from, hello.to, hello.channel);
  if (link && link->route().peer_incarnation == hello.incarnation && !link->channel.failed())
    return link->accept(std::move(one.pipe), hello);
  // A channel that has begun goes on where its link is, or not at all.
  const auto served = served_.find(hello.group);
  if (served != served_.end() && hello.to == 0 && hello.carries && hello.received == 0) {
    const auto admitted = served->second(hello, one.host);
    if (!admitted) return strangers_->count(Strangers::Kind::crowded);
    links_.push_back(admitted);
    return admitted->accept(std::move(one.pipe), hello);
  }
  if (is_expected) return;
  strangers_->count(Strangers::Kind::unknown);
  Hello answer = hello;
  std::swap(answer.from, answer.to);
  answer.incarnation = incarnation_;
  answer.received = 0;
  answer.carries = false;
  answer.unknown = true;
  sendHello(*one.pipe, answer);
}

}  // namespace lowcomm::tcp
