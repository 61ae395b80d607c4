#include "transport/tcp/dialer.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "transport/tcp/pace.h"

namespace lowcomm::tcp {
namespace {

using namespace std::chrono_literals;

constexpr auto kAnswerWithin = 3s, kAnswerSoon = 1s;
constexpr auto kFirstPause = 10ms, kLongestPause = 500ms;
constexpr int kRounds = 3;
constexpr auto kReverseAfter = 2s, kRelayAfter = 4s;
constexpr auto kJoinedWithin = 10s;
constexpr const char* kDirect = "direct";
constexpr size_t kAnswerBytes = 1024;  // a Hello, and what TLS puts around it

}  // namespace

bool sendHello(Pipe& pipe, const Hello& hello) {
  std::array<std::byte, kHelloBytes> bytes;
  write(hello, bytes);
  const iovec part{bytes.data(), bytes.size()};
  return pipe.write({&part, 1}).bytes == bytes.size();
}

void Dialer::copyRoute(const Dialer& other) {
  dials_ = other.dials_;
  was_relayed_ = other.was_relayed_;
  next_address_ = was_relayed_ ? route_.addresses.size() : 0;
}

Hello Dialer::hello(bool carries) {
  Hello hello;
  hello.group = route_.group;
  hello.from = static_cast<uint32_t>(route_.rank);
  hello.to = static_cast<uint32_t>(route_.peer);
  hello.channel = route_.channel;
  hello.incarnation = route_.incarnation;
  const auto lock = stream_.lock();
  hello.received = stream_.in();
  hello.carries = carries;
  return hello;
}

pollfd Dialer::waitsFor() const {
  if (!dial_) return {-1, 0, 0};
  const bool writes = !dial_->connected || dial_->pipe->holds();
  return {dial_->pipe->fd(), static_cast<short>((dial_->connected ? POLLIN : 0) | (writes ? POLLOUT : 0)), 0};
}

Dialer::Outcome Dialer::tick() {
  const auto now = Clock::now();
  if (const auto most = route_.patience; most.count() > 0 && now - down_since_ > most)
    return {.gone = "expected a connection within " + std::to_string(most.count()) + " s, got none: " + lost_why_};
  if (dial_) return now > dial_->deadline ? silent() : Outcome{};
  return now >= dial_at_ ? dial() : Outcome{};
}

bool Dialer::answer(Pipe& pipe, const Hello& theirs, bool connected) {
  // If both sides dial at once, the side whose turn it was wins, unless it gets no answer.
  const bool is_dialling = dial_ && dial_->said && dial_->deadline - Clock::now() > kAnswerWithin - kAnswerSoon;
  const bool is_turned = dials_ && !connected && !is_dialling;
  const bool carries = theirs.carries && (!dials_ || is_turned);
  if (!sendHello(pipe, hello(carries)) || !carries) return false;
  dials_ = false;
  return true;
}

std::unique_ptr<Pipe> Dialer::pipeOver(Fd fd) const {
  if (!route_.tls) return std::make_unique<Pipe>(std::move(fd));
  return route_.tls->dial(std::move(fd),
                          {route_.group, static_cast<uint32_t>(route_.rank), static_cast<uint32_t>(route_.peer),
                           route_.channel, route_.incarnation, route_.peer_incarnation, Tls::preferred()});
}

bool Dialer::wantsRelay() const {
  return route_.addresses.empty() || was_relayed_ || Clock::now() - down_since_ > kRelayAfter;
}

Dialer::Outcome Dialer::dial() {
  const size_t direct = route_.addresses.size(), all = direct + (wantsRelay() ? route_.relays.size() : 0);
  if (all == 0) return {};
  if (next_address_ >= all) next_address_ = 0;
  const bool by_relay = next_address_ >= direct;
  const auto& [text, address] = by_relay ? route_.relays[next_address_ - direct] : route_.addresses[next_address_];
  Fd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd) beginCongestion(fd.get());
  if (fd && (::connect(fd.get(), address.get(), address.size) == 0 || errno == EINPROGRESS)) {
    dial_ = Dial{};  // not emplace(): Clang knows the members' initial values only after the class
    dial_->to = (by_relay ? "relay " : "") + text;
    dial_->by_relay = by_relay;
    dial_->pipe = by_relay ? std::make_unique<Pipe>(std::move(fd)) : pipeOver(std::move(fd));
    dial_->carries = by_relay || dials_ || Clock::now() - down_since_ > kReverseAfter;
    dial_->deadline = Clock::now() + (by_relay ? kJoinedWithin : kAnswerWithin);
    return {};
  }
  const int error = errno;
  lost_why_ = text + ": " + std::strerror(error);
  return error == ECONNREFUSED && !by_relay ? refused() : silent();
}

Dialer::Outcome Dialer::ready() {
  if (!dial_) return {};
  if (!dial_->connected) {
    int error = 0;
    socklen_t size = sizeof(error);
    ::getsockopt(dial_->pipe->fd(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      lost_why_ = dial_->to + ": " + std::strerror(error);
      return error == ECONNREFUSED && !dial_->by_relay ? refused() : silent();
    }
    dial_->connected = true;
  }
  if (dial_->by_relay && !dial_->joined) return relayReady();
  Pipe& pipe = *dial_->pipe;
  if (const auto over = readAnswer()) {
    lost_why_ = dial_->to + ": " + *over;
    if (pipe.wrong() == Pipe::Wrong::nothing) return silent();
    if (pipe.wrong() == Pipe::Wrong::secret) noteOtherSecret();
    return refused();
  }
  if (dial_->have < kHelloBytes) return {};
  Hello answer;
  try {
    answer = parseHello(dial_->answer);
  } catch (const WireError& error) {
    lost_why_ = dial_->to + ": " + error.what();
    return silent();
  }
  if (route_.peer_incarnation == 0 && !answer.unknown) route_.peer_incarnation = answer.incarnation;
  if (answer.unknown || answer.group != route_.group || answer.incarnation != route_.peer_incarnation) {
    lost_why_ = dial_->to + ": another process, or one that has left the group";
    return refused();
  }
  auto made = std::move(dial_->pipe);
  const bool carries = dial_->carries, by_relay = dial_->by_relay;
  dial_.reset();
  refused_rounds_ = 0;
  pause_ = kLongestPause;
  dial_at_ = Clock::now() + pause_;
  if (!carries || !answer.carries) return {};
  if (!by_relay) dials_ = true;
  return {std::move(made), answer};
}

// The relay is asked, and answers when the peer is there too.
Dialer::Outcome Dialer::relayReady() {
  Hello request = hello(/*carries=*/false);
  request.relays = true;
  if (!dial_->said) {
    std::array<std::byte, kHelloBytes + kRelayCodeBytes> bytes{};
    tcp::write(request, std::span(bytes).first<kHelloBytes>());
    if (route_.tls) std::ranges::copy(route_.tls->relayCode(request), bytes.begin() + kHelloBytes);
    const iovec part{bytes.data(), bytes.size()};
    if (dial_->pipe->write({&part, 1}).bytes != bytes.size()) return silent();
  }
  dial_->said = true;
  if (const auto over = readAnswer()) {
    lost_why_ = dial_->to + ": " + *over;
    return silent();
  }
  if (dial_->have < kHelloBytes) return {};
  try {
    if (!parseHello(dial_->answer).relays) throw WireError("expected the answer of a relay");
  } catch (const WireError& error) {
    lost_why_ = dial_->to + ": " + error.what();
    return silent();
  }
  Fd fd = dial_->pipe->release();
  if (route_.rank < route_.peer) {
    joined_ = std::move(fd);
    return silent();  // of this rank's dials; the peer's Hello comes as from outside
  }
  dial_->pipe = pipeOver(std::move(fd));
  dial_->joined = true;
  dial_->said = false;
  dial_->have = 0;
  dial_->deadline = Clock::now() + kAnswerWithin;
  return ready();
}

// Opens the pipe, sends the Hello and reads the answer, as far as the socket allows. Returns why there will be none.
std::optional<std::string> Dialer::readAnswer() {
  Pipe& pipe = *dial_->pipe;
  if (auto over = pipe.isOpen() ? pipe.flush() : pipe.open()) return over;
  if (!pipe.isOpen()) return {};
  if (!dial_->said && !sendHello(pipe, hello(dial_->carries))) return "no room for a hello";
  dial_->said = true;
  while (dial_->have < kHelloBytes) {
    size_t turn = kAnswerBytes;
    const Moved got = pipe.read(std::span(dial_->answer).subspan(dial_->have), turn);
    if (got.bytes == 0) return got.over;
    dial_->have += got.bytes;
  }
  return {};
}

// Whether refused connections prove anything about the peer. An address that has never worked may be another host's as
// seen from here, and the peer has some time to dial by itself.
bool Dialer::refusalsCount() const {
  if (route_.addresses.empty()) return false;
  if (hasOtherSecret()) return true;
  if (was_connected_) return dials_ == route_.dials;
  return Clock::now() - down_since_ > 2 * kReverseAfter;
}

Dialer::Outcome Dialer::refused() {
  refused_why_ = lost_why_;
  return tryNext();
}

Dialer::Outcome Dialer::silent() {
  if (next_address_ < route_.addresses.size()) all_refused_ = false;  // a relay says nothing of the peer
  return tryNext();
}

Dialer::Outcome Dialer::tryNext() {
  dial_.reset();
  if (++next_address_ < route_.addresses.size() + (wantsRelay() ? route_.relays.size() : 0)) return {};
  next_address_ = 0;
  refused_rounds_ = all_refused_ && refusalsCount() ? refused_rounds_ + 1 : 0;
  all_refused_ = true;
  pause_ = std::clamp(2 * pause_, std::chrono::milliseconds(kFirstPause), std::chrono::milliseconds(kLongestPause));
  if (refused_rounds_ >= kRounds)
    return {.gone = hasOtherSecret() ? kOtherSecret : "the peer's process or group is gone: " + refused_why_};
  dial_at_ = Clock::now() + std::max(pause_, std::chrono::milliseconds(100));
  return {};
}

void Dialer::connected(int fd) {
  dial_.reset();
  was_connected_ = true;
  refused_rounds_ = 0;
  was_relayed_ = pathOf(fd) != kDirect;
  next_address_ = was_relayed_ ? route_.addresses.size() : 0;
}

void Dialer::lost(const std::string& why) {
  lost_why_ = why;
  down_since_ = Clock::now();
  pause_ = dials_ ? 0ms : std::chrono::milliseconds(kLongestPause) / 2;
  dial_at_ = Clock::now() + pause_;
}

std::string Dialer::pathOf(int fd) const {
  Address peer;
  peer.size = sizeof(peer.storage);
  if (::getpeername(fd, peer.get(), &peer.size) != 0) return kDirect;
  for (const auto& [text, address] : route_.relays) {
    if (address.size == peer.size && std::memcmp(address.get(), peer.get(), peer.size) == 0) return "relay " + text;
  }
  return kDirect;
}

}  // namespace lowcomm::tcp
