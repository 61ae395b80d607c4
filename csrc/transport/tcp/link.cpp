#include "transport/tcp/link.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "transport/tcp/congestion.h"

namespace lowcomm::tcp {
namespace {

using namespace std::chrono_literals;

constexpr auto kAnswerWithin = 3s;
constexpr auto kFirstPause = 10ms, kLongestPause = 500ms;
constexpr int kRounds = 3;
constexpr size_t kAnswerBytes = 1024;  // a Hello, and what TLS puts around it

}  // namespace

bool say(Pipe& pipe, const Hello& hello) {
  std::array<std::byte, kHelloBytes> bytes;
  write(hello, bytes);
  const iovec part{bytes.data(), bytes.size()};
  return pipe.write({&part, 1}).bytes == bytes.size();
}

Hello Link::hello() {
  const auto lock = channel.lock();
  return {route_.group,
          static_cast<uint32_t>(route_.rank),
          static_cast<uint32_t>(route_.peer),
          route_.channel,
          route_.incarnation,
          channel.in()};
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
    if (const auto over = connection_->unblock()) lost(*over);
  }
}

void Link::receive() {
  try {
    const auto over = connection_->read();
    if (over && connection_->saidLast()) return fail("the peer has closed the channel");
    if (over) lost(*over);
  } catch (const WireError& error) {
    fail(std::string("not what a peer of this version sends: ") + error.what());
  }
}

std::optional<uint64_t> Link::next() {
  return ended_ || !connection_ ? std::nullopt : connection_->next();
}

void Link::write() {
  if (const auto over = connection_->write()) lost(*over);
}

void Link::tick() {
  if (ended_) return;
  if (connection_) {
    if (connection_->isQuiet()) receive();
    if (!connection_) return;
    if (const auto over = connection_->tick()) lost(*over);
  } else if (dial_) {
    if (Clock::now() > dial_->deadline) silent();
  } else if (Clock::now() >= dial_at_ && !route_.addresses.empty()) {
    dial();
  }
}

// ---- made by the peer ----

void Link::accept(std::unique_ptr<Pipe> pipe, const Hello& theirs) {
  if (!say(*pipe, hello())) return;
  if (route_.dials()) return;  // it only asks
  attach(std::move(pipe), theirs);
}

// ---- made from here ----

void Link::dial() {
  const auto& [text, address] = route_.addresses[next_address_];
  Fd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd) beginCongestion(fd.get());
  if (fd && (::connect(fd.get(), address.get(), address.size) == 0 || errno == EINPROGRESS)) {
    std::unique_ptr<Pipe> pipe;
    if (route_.tls) {
      pipe = route_.tls->dial(std::move(fd), identity());
    } else {
      pipe = std::make_unique<Pipe>(std::move(fd));
    }
    dial_ = Dial{std::move(pipe), false, false, Clock::now() + kAnswerWithin, {}, 0};
    return;
  }
  const int error = errno;
  lost_why_ = text + ": " + std::strerror(error);
  error == ECONNREFUSED ? refused() : silent();
}

void Link::dialReady() {
  Pipe& pipe = *dial_->pipe;
  if (!dial_->connected) {
    int error = 0;
    socklen_t size = sizeof(error);
    ::getsockopt(pipe.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      lost_why_ = route_.addresses[next_address_].first + ": " + std::strerror(error);
      return error == ECONNREFUSED ? refused() : silent();
    }
    dial_->connected = true;
  }
  if (const auto over = hearAnswer()) {
    lost_why_ = route_.addresses[next_address_].first + ": " + *over;
    if (pipe.wrong() == Pipe::Wrong::nothing) return silent();
    if (pipe.wrong() == Pipe::Wrong::secret) noteOtherSecret();
    return refused();
  }
  if (dial_->have < kHelloBytes) return;
  Hello answer;
  try {
    answer = parseHello(dial_->answer);
  } catch (const WireError& error) {
    lost_why_ = route_.addresses[next_address_].first + ": " + error.what();
    return silent();
  }
  if (answer.unknown || answer.group != route_.group || answer.incarnation != route_.peer_incarnation) {
    lost_why_ = route_.addresses[next_address_].first + ": another process, or one that has left the group";
    return refused();
  }
  auto made = std::move(dial_->pipe);
  dial_.reset();
  refused_rounds_ = 0;
  pause_ = route_.dials() ? 0ms : kLongestPause;
  dial_at_ = Clock::now() + pause_;
  if (route_.dials()) attach(std::move(made), answer);
}

// As far as that goes: the pipe is opened, the Hello said and the answer heard. Returns why there will be none.
std::optional<std::string> Link::hearAnswer() {
  Pipe& pipe = *dial_->pipe;
  if (auto over = pipe.isOpen() ? pipe.flush() : pipe.open()) return over;
  if (!pipe.isOpen()) return {};
  if (!dial_->said && !say(pipe, hello())) return "no room for a hello";
  dial_->said = true;
  while (dial_->have < kHelloBytes) {
    size_t turn = kAnswerBytes;
    const Moved got = pipe.read(std::span(dial_->answer).subspan(dial_->have), turn);
    if (got.bytes == 0) return got.over;
    dial_->have += got.bytes;
  }
  return {};
}

// The address has said that nobody is there.
void Link::refused() {
  dial_.reset();
  if (++next_address_ == route_.addresses.size()) {
    next_address_ = 0;
    refused_rounds_ = all_refused_ ? refused_rounds_ + 1 : 0;
    all_refused_ = true;
    pause_ = std::clamp(2 * pause_, std::chrono::milliseconds(kFirstPause), std::chrono::milliseconds(kLongestPause));
    if (refused_rounds_ >= kRounds) {
      return fail(hasOtherSecret() ? kOtherSecret : "the peer's process or group is gone: " + lost_why_);
    }
    dial_at_ = Clock::now() + std::max(pause_, std::chrono::milliseconds(100));
  }
}

void Link::silent() {
  all_refused_ = false;
  refused();
}

// ---- either way ----

void Link::attach(std::unique_ptr<Pipe> pipe, const Hello& theirs) {
  dial_.reset();
  try {
    const auto lock = channel.lock();
    channel.received(theirs.received);
  } catch (const WireError& error) {
    return fail(std::string("not what a peer of this version sends: ") + error.what());
  }
  drop();
  connection_ = std::make_unique<Connection>(std::move(pipe), channel, theirs.received);
  ++connections_;
  refused_rounds_ = 0;
  ready(POLLIN);  // the pipe may hold more than the Hello
}

void Link::drop() {
  if (!connection_) return;
  past_.sent_bytes += connection_->sent();
  past_.received_bytes += connection_->received();
  past_.retransmitted += reportOf(connection_->pipe().fd()).retransmitted;
  connection_.reset();
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
  return report;
}

void Link::lost(const std::string& why) {
  lost_why_ = why;
  drop();
  pause_ = route_.dials() ? 0ms : std::chrono::milliseconds(kLongestPause) / 2;
  dial_at_ = Clock::now() + pause_;
}

void Link::fail(const std::string& why) {
  ended_ = true;
  drop();
  dial_.reset();
  channel.fail(TransportError::Kind::closed, why);
}

void Link::end(const std::string& why) {
  if (connection_ && !ended_) connection_->sayLast();
  ended_ = true;
  drop();
  dial_.reset();
  channel.fail(TransportError::Kind::cancelled, why);
}

}  // namespace lowcomm::tcp
