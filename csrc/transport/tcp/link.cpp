#include "transport/tcp/link.h"

#include "base/error.h"
#include "transport/tcp/pace.h"

namespace lowcomm::tcp {
namespace {

constexpr const char* kWrongBytes = "not what a peer of this version sends: ";

}  // namespace

pollfd Link::waitsFor() const {
  if (!connection_) return dialer_.waitsFor();
  return {connection_->fd(), static_cast<short>(POLLIN | (connection_->blocked() ? POLLOUT : 0)), 0};
}

void Link::ready(short events) {
  if (ended_) return;
  if (!connection_) return take(dialer_.ready());
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
  if (!connection_) return take(dialer_.tick());
  if (connection_->isQuiet()) receive();
  if (!connection_) return;
  if (const auto over = connection_->tick()) broken(*over);
}

void Link::accept(std::unique_ptr<Pipe> pipe, const Hello& theirs) {
  if (dialer_.answer(*pipe, theirs, isConnected())) attach(std::move(pipe), theirs);
}

void Link::take(Dialer::Outcome outcome) {
  if (outcome.gone) return fail(*outcome.gone);
  if (outcome.pipe) attach(std::move(outcome.pipe), outcome.answer);
}

void Link::attach(std::unique_ptr<Pipe> pipe, const Hello& theirs) {
  try {
    const auto lock = channel.lock();
    channel.out().resume(theirs.received);
  } catch (const WireError& error) {
    return fail(std::string(kWrongBytes) + error.what());
  }
  drop();
  connection_ = std::make_unique<Connection>(std::move(pipe), channel, theirs.received, route().is_one_of_several);
  ++connections_;
  dialer_.connected(connection_->fd());
  ready(POLLIN);  // the pipe may hold more than the Hello
}

void Link::drop() {
  if (!connection_) return;
  past_.sent_bytes += connection_->sent();
  past_.received_bytes += connection_->received();
  past_.retransmitted += reportOf(connection_->fd()).retransmitted;
  connection_.reset();
}

ConnectionReport Link::report() const {
  ConnectionReport report = past_;
  report.peer = route().peer;
  report.lane = route().channel == 0 ? Lane::control : Lane::bulk;
  report.number = route().channel == 0 ? 0 : static_cast<int>(route().channel) - 1;
  report.times_made = connections_;
  report.is_connected = isConnected();
  if (!connection_) return report;
  report.sent_bytes += connection_->sent();
  report.received_bytes += connection_->received();
  SocketReport socket = reportOf(connection_->fd());
  report.retransmitted += socket.retransmitted;
  report.round_trip_s = socket.round_trip_s;
  report.least_round_trip_s = socket.least_round_trip_s;
  report.acknowledged_bytes = socket.acknowledged_bytes;
  report.busy_s = socket.busy_s;
  report.congestion = std::move(socket.congestion);
  report.cipher = connection_->pipe().cipher();
  report.path = dialer_.pathOf(connection_->fd());
  return report;
}

void Link::lost(const std::string& why) {
  drop();
  dialer_.lost(why);
}

void Link::fail(const std::string& why) {
  ended_ = true;
  drop();
  dialer_.stop();
  channel.fail(TransportError::Kind::closed, why);
}

Fd Link::end(const std::string& why) {
  // The peer is to receive the records of what was delivered here, or its sends would fail.
  while (!ended_ && connection_ && !connection_->blocked() && connection_->next() == 0)
    write();
  Fd last;
  if (connection_ && !ended_ && connection_->sayLast()) last = connection_->pipe().release();
  ended_ = true;
  drop();
  dialer_.stop();
  channel.fail(TransportError::Kind::cancelled, why);
  return last;
}

}  // namespace lowcomm::tcp
