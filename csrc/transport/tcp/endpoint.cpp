#include "transport/tcp/endpoint.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <random>

#include "base/error.h"
#include "base/process.h"
#include "base/signals.h"

namespace lowcomm::tcp {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

constexpr milliseconds kTick{20};

uint64_t randomNumber() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

}  // namespace

Endpoint::Endpoint(const EndpointOptions& options)
    : incarnation_(randomNumber()),
      tls_(options.secret ? std::make_shared<Tls>(*options.secret) : nullptr),
      relay_address_(options.relay),
      pace_(options.rate),
      admission_(links_, options, tls_, incarnation_) {
  checkCongestion(Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)).get());
  thread_ = std::thread([this] { run(); });
}

Endpoint::~Endpoint() {
  halt();
}

void Endpoint::halt() {
  locked([&] {
    stays_until_ = Clock::now() + kStays;
    admission_.close();  // its port is another's to take
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

std::shared_ptr<Delivery> Endpoint::send(MessageStream& channel, uint32_t tag, std::span<const std::byte> data,
                                         std::function<void()> then) {
  auto delivery = channel.send(tag, data, ++places_, std::move(then));
  wake();
  return delivery;
}

std::shared_ptr<Delivery> Endpoint::receive(MessageStream& channel, uint32_t tag, std::span<std::byte> room,
                                            std::function<void()> then) {
  auto delivery = channel.receive(tag, room, std::move(then));
  if (delivery->came_early) wake();
  return delivery;
}

void Endpoint::add(const std::shared_ptr<Link>& link) {
  {
    std::lock_guard lock(mutex_);
    links_.push_back(link);
  }
  wake();
}

void Endpoint::remove(const std::shared_ptr<Link>& link) {
  std::lock_guard lock(mutex_);
  std::erase(links_, link);
  Fd last = link->end("the lane was cancelled");
  if (!last) return;
  last_bytes_.add(std::move(last), Clock::now() + kStays);
  wake();
}

bool Endpoint::stays() {
  std::lock_guard lock(mutex_);
  return Clock::now() < stays_until_ && (!last_bytes_.empty() || admission_.relayed().first > 0);
}

void Endpoint::deafen() {
  std::lock_guard lock(mutex_);
  admission_.pauseUntil(Clock::time_point::max());
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
  std::vector<pollfd> waits{waker_.waitsFor()};
  std::vector<std::shared_ptr<Link>> links;
  size_t first_from_outside = 0, first_last_bytes = 0;
  {
    std::lock_guard lock(mutex_);
    for (const auto& link : links_) {
      const pollfd wait = link->waitsFor();
      if (wait.fd < 0) continue;
      links.push_back(link);
      waits.push_back(wait);
    }
    first_from_outside = waits.size();
    admission_.waitFor(waits);
    first_last_bytes = waits.size();
    last_bytes_.waitFor(waits);
  }
  if (::poll(waits.data(), waits.size(), static_cast<int>(patience_.count())) < 0 && errno != EINTR)
    return failAll("poll: expected to wait for " + std::to_string(waits.size()) +
                   " descriptors, got: " + std::strerror(errno));
  waker_.clear(waits[0].revents);

  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < links.size(); ++i) {
    const pollfd& wait = waits[1 + i];
    // Not where another connection has taken the place of the one that was waited for.
    if (wait.revents && links[i]->waitsFor().fd == wait.fd) links[i]->ready(wait.revents);
  }
  patience_ = writeAll();
  last_bytes_.closeDone();
  admission_.ready(std::span(waits).subspan(first_from_outside, first_last_bytes - first_from_outside));
  if (Clock::now() < tick_at_) return;
  tick_at_ = Clock::now() + kTick;
  admission_.tick();
  for (const auto& link : links_) {
    link->tick();
    if (Fd joined = link->dialer().takeJoined()) admission_.admitJoined(std::move(joined));
  }
}

// poll() failed for all descriptors: every link fails with `why`.
void Endpoint::failAll(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    for (const auto& link : links_)
      link->fail(why);
    admission_.clear();
    last_bytes_.clear();
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
    // Records of deliveries are not held back: they are few, and peers wait for them.
    if (const auto wait = pace_.wait(); place > 0 && wait > 0ms)
      return std::min(kTick, std::chrono::ceil<milliseconds>(wait));
    const uint64_t before = first->sent();
    first->write();
    pace_.sent(first->sent() - before);
  }
}

milliseconds left(Clock::time_point end) {
  return std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(end - Clock::now()));
}

void rest() {
  runSignalHandlers();
  std::this_thread::sleep_for(milliseconds(2));
}

void waitFor(Delivery& delivery, int peer, Clock::time_point end) {
  while (!delivery.ended() && Clock::now() < end)
    rest();
  delivery.wait(peer, left(end));
}

std::pair<size_t, uint64_t> Endpoint::relayed() {
  std::lock_guard lock(mutex_);
  return admission_.relayed();
}

}  // namespace lowcomm::tcp
