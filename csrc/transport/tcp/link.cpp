#include "transport/tcp/link.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

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
constexpr const char* kWrongBytes = "not what a peer of this version sends: ";
constexpr size_t kAnswerBytes = 1024;  // a Hello, and what TLS puts around it

}  // namespace

bool sendHello(Pipe& pipe, const Hello& hello) {
  std::array<std::byte, kHelloBytes> bytes;
  write(hello, bytes);
  const iovec part{bytes.data(), bytes.size()};
  return pipe.write({&part, 1}).bytes == bytes.size();
}

void Link::copyRoute(const Link& other) {
  dials_ = other.dials_;
  was_relayed_ = other.was_relayed_;
  next_address_ = was_relayed_ ? route_.addresses.size() : 0;
}

bool Link::wantsToCarry() const {
  return dials_ || Clock::now() - down_since_ > kReverseAfter;
}

Hello Link::hello(bool carries) {
  Hello hello;
  hello.group = route_.group;
  hello.from = static_cast<uint32_t>(route_.rank);
  hello.to = static_cast<uint32_t>(route_.peer);
  hello.channel = route_.channel;
  hello.incarnation = route_.incarnation;
  const auto lock = channel.lock();
  hello.received = channel.in();
  hello.carries = carries;
  return hello;
}

Identity Link::identity() const {
  return {route_.group,
          static_cast<uint32_t>(route_.rank),
          static_cast<uint32_t>(route_.peer),
          route_.channel,
          route_.incarnation,
          route_.peer_incarnation,
          Tls::preferred()};
}

pollfd Link::waitsFor() const {
  if (connection_) return {connection_->fd(), static_cast<short>(POLLIN | (connection_->blocked() ? POLLOUT : 0)), 0};
  if (dial_) {
    const bool writes = !dial_->connected || dial_->pipe->holds();
    return {dial_->pipe->fd(), static_cast<short>((dial_->connected ? POLLIN : 0) | (writes ? POLLOUT : 0)), 0};
  }
  return {-1, 0, 0};
}

void Link::ready(short events) {
  if (ended_) return;
  if (dial_ && !connection_) return dialReady();
  if (!connection_) return;
  if (events & (POLLIN | POLLHUP | POLLERR)) receive();
  if (connection_ && (events & POLLOUT)) {
    if (const auto over = connection_->unblock()) broken(*over);
  }
}

void Link::receive() {
  try {
    const auto over = connection_->read();
    if (over && connection_->saidLast()) return fail(kChannelClosed);
    if (over) lost(*over);
  } catch (const WireError& error) {
    fail(std::string(kWrongBytes) + error.what());
  }
}

std::optional<uint64_t> Link::next() {
  return ended_ || !connection_ ? std::nullopt : connection_->next();
}

void Link::write() {
  if (const auto over = connection_->write()) broken(*over);
}

// Reads what the peer said before, which may be that it has ended the channel.
void Link::broken(const std::string& why) {
  receive();
  if (connection_) lost(why);
}

void Link::tick() {
  if (ended_) return;
  if (const auto most = route_.patience; !connection_ && most.count() > 0 && Clock::now() - down_since_ > most)
    return fail("expected a connection within " + std::to_string(most.count()) + " s, got none: " + lost_why_);
  if (connection_) {
    if (connection_->isQuiet()) receive();
    if (!connection_) return;
    if (const auto over = connection_->tick()) broken(*over);
  } else if (dial_) {
    if (Clock::now() > dial_->deadline) silent();
  } else if (Clock::now() >= dial_at_) {
    dial();
  }
}

// ---- made by the peer ----

void Link::accept(std::unique_ptr<Pipe> pipe, const Hello& theirs) {
  // If both sides dial at once, the side whose turn it was wins, unless it gets no answer.
  const bool is_dialling = dial_ && dial_->said && dial_->deadline - Clock::now() > kAnswerWithin - kAnswerSoon;
  const bool is_turned = dials_ && !connection_ && !is_dialling;
  const bool carries = theirs.carries && (!dials_ || is_turned);
  if (!sendHello(*pipe, hello(carries)) || !carries) return;
  dials_ = false;
  attach(std::move(pipe), theirs);
}

// ---- made from here ----

std::unique_ptr<Pipe> Link::pipeOver(Fd fd) const {
  if (route_.tls) return route_.tls->dial(std::move(fd), identity());
  return std::make_unique<Pipe>(std::move(fd));
}

bool Link::wantsRelay() const {
  return route_.addresses.empty() || was_relayed_ || Clock::now() - down_since_ > kRelayAfter;
}

void Link::dial() {
  const size_t direct = route_.addresses.size(), all = direct + (wantsRelay() ? route_.relays.size() : 0);
  if (all == 0) return;
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
    dial_->carries = by_relay || wantsToCarry();
    dial_->deadline = Clock::now() + (by_relay ? kJoinedWithin : kAnswerWithin);
    return;
  }
  const int error = errno;
  lost_why_ = text + ": " + std::strerror(error);
  error == ECONNREFUSED && !by_relay ? refused() : silent();
}

void Link::dialReady() {
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
  if (const auto over = hearAnswer()) {
    lost_why_ = dial_->to + ": " + *over;
    if (pipe.wrong() == Pipe::Wrong::nothing) return silent();
    if (pipe.wrong() == Pipe::Wrong::secret) noteOtherSecret();
    return refused();
  }
  if (dial_->have < kHelloBytes) return;
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
  if (!carries || !answer.carries) return;
  if (!by_relay) dials_ = true;
  attach(std::move(made), answer);
}

// The relay is asked, and answers when the peer is there too.
void Link::relayReady() {
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
  if (const auto over = hearAnswer()) {
    lost_why_ = dial_->to + ": " + *over;
    return silent();
  }
  if (dial_->have < kHelloBytes) return;
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
  dialReady();
}

// As far as that goes: the pipe is opened, the Hello said and the answer heard. Returns why there will be none.
std::optional<std::string> Link::hearAnswer() {
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
bool Link::refusalsCount() const {
  if (route_.addresses.empty()) return false;
  if (hasOtherSecret()) return true;
  if (connections_ > 0) return dials_ == route_.dials;
  return Clock::now() - down_since_ > 2 * kReverseAfter;
}

void Link::refused() {
  refused_why_ = lost_why_;
  tryNext();
}

void Link::silent() {
  if (next_address_ < route_.addresses.size()) all_refused_ = false;  // a relay says nothing of the peer
  tryNext();
}

void Link::tryNext() {
  dial_.reset();
  if (++next_address_ < route_.addresses.size() + (wantsRelay() ? route_.relays.size() : 0)) return;
  next_address_ = 0;
  refused_rounds_ = all_refused_ && refusalsCount() ? refused_rounds_ + 1 : 0;
  all_refused_ = true;
  pause_ = std::clamp(2 * pause_, std::chrono::milliseconds(kFirstPause), std::chrono::milliseconds(kLongestPause));
  if (refused_rounds_ >= kRounds)
    return fail(hasOtherSecret() ? kOtherSecret : "the peer's process or group is gone: " + refused_why_);
  dial_at_ = Clock::now() + std::max(pause_, std::chrono::milliseconds(100));
}

// ---- either way ----

void Link::attach(std::unique_ptr<Pipe> pipe, const Hello& theirs) {
  dial_.reset();
  try {
    const auto lock = channel.lock();
    channel.out().resume(theirs.received);
  } catch (const WireError& error) {
    return fail(std::string(kWrongBytes) + error.what());
  }
  drop();
  connection_ = std::make_unique<Connection>(std::move(pipe), channel, theirs.received, route_.is_one_of_several);
  ++connections_;
  refused_rounds_ = 0;
  was_relayed_ = pathOf(connection_->pipe().fd()) != kDirect;
  next_address_ = was_relayed_ ? route_.addresses.size() : 0;
  ready(POLLIN);  // the pipe may hold more than the Hello
}

void Link::drop() {
  if (!connection_) return;
  past_.sent_bytes += connection_->sent();
  past_.received_bytes += connection_->received();
  past_.retransmitted += reportOf(connection_->pipe().fd()).retransmitted;
  connection_.reset();
  down_since_ = Clock::now();
}

// Names the path by the address at the other end.
std::string Link::pathOf(int fd) const {
  Address peer;
  peer.size = sizeof(peer.storage);
  if (::getpeername(fd, peer.get(), &peer.size) != 0) return kDirect;
  for (const auto& [text, address] : route_.relays) {
    if (address.size == peer.size && std::memcmp(address.get(), peer.get(), peer.size) == 0) return "relay " + text;
  }
  return kDirect;
}

ConnectionReport Link::report() const {
  ConnectionReport report = past_;
  report.peer = route_.peer;
  report.lane = route_.channel == 0 ? Lane::control : Lane::bulk;
  report.number = route_.channel == 0 ? 0 : static_cast<int>(route_.channel) - 1;
  report.times_made = connections_;
  report.is_connected = connection_ != nullptr;
  if (!connection_) return report;
  report.sent_bytes += connection_->sent();
  report.received_bytes += connection_->received();
  SocketReport socket = reportOf(connection_->pipe().fd());
  report.retransmitted += socket.retransmitted;
  report.round_trip_s = socket.round_trip_s;
  report.least_round_trip_s = socket.least_round_trip_s;
  report.congestion = std::move(socket.congestion);
  report.cipher = connection_->pipe().cipher();
  report.path = pathOf(connection_->pipe().fd());
  return report;
}

void Link::lost(const std::string& why) {
  lost_why_ = why;
  drop();
  pause_ = dials_ ? 0ms : std::chrono::milliseconds(kLongestPause) / 2;
  dial_at_ = Clock::now() + pause_;
}

void Link::fail(const std::string& why) {
  ended_ = true;
  drop();
  dial_.reset();
  channel.fail(TransportError::Kind::closed, why);
}

Fd Link::end(const std::string& why) {
  // The peer is to hear of what was delivered here, or its sends would fail.
  while (!ended_ && connection_ && !connection_->blocked() && connection_->next() == 0)
    write();
  Fd last;
  if (connection_ && !ended_ && connection_->sayLast()) last = connection_->pipe().release();
  ended_ = true;
  drop();
  dial_.reset();
  channel.fail(TransportError::Kind::cancelled, why);
  return last;
}

}  // namespace lowcomm::tcp
