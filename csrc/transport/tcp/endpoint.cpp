#include "transport/tcp/endpoint.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>

#include "base/error.h"
#include "base/process.h"

namespace lowcomm::tcp {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

constexpr size_t kAcceptsATurn = 8, kReadsATurn = 64;
constexpr milliseconds kTick{20};

uint64_t randomNumber() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

}  // namespace

Endpoint::Endpoint(const EndpointOptions& options)
    : waker_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      incarnation_(randomNumber()),
      tls_(options.secret ? std::make_shared<Tls>(*options.secret) : nullptr),
      relay_address_(options.relay),
      relays_all_(options.relays_all),
      pace_(options.rate) {
  checkCongestion(Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)).get());
  const std::string port = options.dials_only ? "none" : listen(options);
  strangers_.emplace(port, tls_, incarnation_);
  thread_ = std::thread([this] { run(); });
}

// Returns the port.
std::string Endpoint::listen(const EndpointOptions& options) {
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

Endpoint::~Endpoint() {
  halt();
}

void Endpoint::halt() {
  locked([&] {
    stays_until_ = Clock::now() + kStays;
    listener_ = Fd();  // its port is another's to take
  });
  stop_ = true;
  wake();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Endpoint> Endpoint::shared() {
  static std::mutex mutex;
  static std::weak_ptr<Endpoint> only;
  static pid_t process = 0;
  std::lock_guard lock(mutex);
  std::shared_ptr<Endpoint> endpoint = only.lock();
  const bool is_forked = std::exchange(process, ::getpid()) != ::getpid();  // then its thread is not here
  const EndpointOptions options = EndpointOptions::fromEnvironment();
  if (!endpoint || is_forked) {
    only = endpoint = {new Endpoint(options), UnlessForked()};
    // A group that is not destroyed still has it when the process ends: its thread rests before static objects go, and
    // before OpenSSL, if it is not ours alone, cleans up.
    static const int at_exit = std::atexit([] {
      if (const auto living = only.lock(); living && process == ::getpid()) living->halt();
    });
    if (at_exit != 0) throw ValueError("at exit: expected room for a function, got none");
  } else if ((endpoint->tls() ? std::optional(endpoint->tls()->secret()) : std::nullopt) != options.secret) {
    throw ValueError(
        "LOWCOMM_SECRET, LOWCOMM_SECRET_FILE: expected the secret of the groups that this process has, "
        "got another, or one where they have none");
  }
  return endpoint;
}

void Endpoint::expect(const GroupId& group) {
  std::lock_guard lock(mutex_);
  expected_.push_back(group);
}

void Endpoint::expectNoMore(const GroupId& group) {
  std::lock_guard lock(mutex_);
  std::erase(expected_, group);
}

void Endpoint::add(const std::shared_ptr<Link>& link) {
  {
    std::lock_guard lock(mutex_);
    links_.push_back(link);
  }
  wake();
}

void Endpoint::serve(const GroupId& group, Admit admit) {
  std::lock_guard lock(mutex_);
  if (!served_.emplace(group, std::move(admit)).second)
    throw ValueError("a store on the port: expected one in a process, got another");
}

void Endpoint::serveNoMore(const GroupId& group) {
  std::lock_guard lock(mutex_);
  served_.erase(group);
}

void Endpoint::remove(const std::shared_ptr<Link>& link) {
  std::lock_guard lock(mutex_);
  std::erase(links_, link);
  Fd last = link->end("the lane was cancelled");
  if (!last) return;
  ::shutdown(last.get(), SHUT_WR);
  leaving_.push_back({std::move(last), Clock::now() + kStays});
  wake();
}

// The kernel resets a connection that is closed with bytes unread, and drops what it has yet to send. So what the peer
// says is read until it has all that was said to it, or has ended the connection too.
void Endpoint::seeOff() {
  std::array<std::byte, 4096> unread;
  leaving_.remove_if([&](const Leaving& one) {
    ssize_t count = 1;
    for (size_t i = 0; i < kReadsATurn && count > 0; ++i)
      count = ::recv(one.fd.get(), unread.data(), unread.size(), MSG_DONTWAIT);
    const bool is_over = count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
    int on_their_way = 0;
    return is_over || Clock::now() > one.deadline ||
           (::ioctl(one.fd.get(), SIOCOUTQ, &on_their_way) == 0 && on_their_way == 0);
  });
}

bool Endpoint::stays() {
  std::lock_guard lock(mutex_);
  return Clock::now() < stays_until_ && (!leaving_.empty() || relay_.joined() > 0);
}

void Endpoint::wake() {
  if (awake_.exchange(true)) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(waker_.get(), &one, sizeof(one));
}

void Endpoint::deafen() {
  std::lock_guard lock(mutex_);
  accept_at_ = Clock::time_point::max();
}

void Endpoint::cut() {
  std::lock_guard lock(mutex_);
  for (const auto& link : links_) {
    const int fd = link->waitsFor().fd;
    if (fd >= 0) ::shutdown(fd, SHUT_RDWR);
  }
}

void Endpoint::run() {
  sigset_t all;  // signals are for the program's own threads
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  while (!stop_ || stays())
    turn();
}

// Waits until something may be done, and does it. Links that have no socket at the moment are not waited for: poll()
// takes no more entries than a process may have descriptors.
void Endpoint::turn() {
  std::vector<pollfd> waits{{waker_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
  std::vector<std::shared_ptr<Link>> links;
  size_t strangers = 0;
  {
    std::lock_guard lock(mutex_);
    if (Clock::now() < accept_at_) waits[1].fd = -1;
    for (const auto& link : links_) {
      const pollfd wait = link->waitsFor();
      if (wait.fd < 0) continue;
      links.push_back(link);
      waits.push_back(wait);
    }
    strangers_->waitFor(waits);
    strangers = strangers_->size();
    relay_.waitFor(waits);
    for (const Leaving& one : leaving_)
      waits.push_back({one.fd.get(), POLLIN, 0});
  }
  if (::poll(waits.data(), waits.size(), static_cast<int>(patience_.count())) < 0 && errno != EINTR)
    return failAll("poll: expected to wait for " + std::to_string(waits.size()) +
                   " descriptors, got: " + std::strerror(errno));
  if (waits[0].revents) {
    uint64_t count;
    [[maybe_unused]] const ssize_t got = ::read(waker_.get(), &count, sizeof(count));
  }
  awake_ = false;  // not before: what is written after this is for the next turn to read

  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < links.size(); ++i) {
    const pollfd& wait = waits[2 + i];
    // Not where another connection has taken the place of the one that was waited for.
    if (wait.revents && links[i]->waitsFor().fd == wait.fd) links[i]->ready(wait.revents);
  }
  patience_ = writeAll();
  seeOff();
  const auto from_outside = std::span(waits).subspan(2 + links.size());
  relay_.ready(from_outside.subspan(strangers));
  Strangers::PendingHello heard = strangers_->hear(from_outside.first(strangers));
  for (Introduction& one : heard.introductions)
    introduce(one);
  for (const Identity& identity : heard.other_secrets) {
    if (Link* link = linkTo(identity.group, identity.from, identity.to, identity.channel)) link->noteOtherSecret();
  }
  if (waits[1].revents && heard.all) acceptSome();
  if (Clock::now() < tick_at_) return;
  tick_at_ = Clock::now() + kTick;
  strangers_->report();
  relay_.tick();
  for (const auto& link : links_) {
    link->tick();
    if (Fd joined = link->takeJoined()) strangers_->admit(std::move(joined), {});
  }
}

// poll() failed for all descriptors: every link fails with `why`.
void Endpoint::failAll(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    for (const auto& link : links_)
      link->fail(why);
    strangers_->clear();
    relay_.clear();
    leaving_.clear();
  }
  std::this_thread::sleep_for(kTick);  // it may be so again
}

std::chrono::milliseconds Endpoint::writeAll() {
  for (const auto& link : links_) {
    while (link->route().channel == 0 && !link->blocked() && link->next())
      link->write();
  }
  while (true) {
    const auto now = Clock::now();
    Link* first = nullptr;
    uint64_t place = 0;
    for (const auto& link : links_) {
      if (link->route().channel == 0) continue;
      if (const auto blocked = link->blocked(); blocked && now - *blocked >= link->patience()) continue;
      const auto next = link->next();
      if (next && (!first || *next < place)) first = link.get(), place = *next;
    }
    if (!first) return kTick;
    if (first->blocked()) return first->patience();
    // Words of deliveries are not held back: they are few, and peers wait for them.
    if (const auto wait = pace_.wait(); place > 0 && wait > 0ms)
      return std::min(kTick, std::chrono::ceil<milliseconds>(wait));
    const uint64_t before = first->sent();
    first->write();
    pace_.sent(first->sent() - before);
  }
}

// No more than can be heard soon: who has said something already would have to give way to who has not.
void Endpoint::acceptSome() {
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

Link* Endpoint::linkTo(const GroupId& group, uint32_t from, uint32_t to, uint32_t channel) const {
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
bool Endpoint::mayBeRelayed(const Introduction& one) const {
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

std::pair<size_t, uint64_t> Endpoint::relayed() {
  std::lock_guard lock(mutex_);
  return {relay_.joined(), relay_.bytes()};
}

void Endpoint::introduce(Introduction& one) {
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
