#include "transport/tcp/connection.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.h"

namespace lowcomm::tcp {
namespace {

using namespace std::chrono_literals;

constexpr auto kHeartbeat = 250ms, kSilence = 1500ms;
constexpr size_t kTurnBytes = 1 << 20;
constexpr size_t kParts = 16;
constexpr int kUnsentBytes = 16 * 1024;  // more would only queue in the kernel, before what is more urgent
constexpr auto kJudge = 1s;
constexpr size_t kLastReads = 64;  // of a socket, at a time

}  // namespace

Connection::Connection(std::unique_ptr<Pipe> pipe, MessageStream& channel, uint64_t from, bool is_one_of_several)
    : pipe_(std::move(pipe)), channel_(channel), out_(from), is_one_of_several_(is_one_of_several) {
  const int on = 1;
  ::setsockopt(pipe_->fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  ::setsockopt(pipe_->fd(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof(kUnsentBytes));
  pipe_->readAhead();
}

// Under the channel's lock. Bytes of the stream that a piece has promised are there until the peer has received them.
bool Connection::nextPiece(bool even_empty) {
  const size_t bytes = channel_.out().promise(out_, manner_.piece_bytes - kPieceHeaderBytes);
  if (bytes == 0 && !even_empty) return false;
  tcp::write(Piece{static_cast<uint32_t>(bytes), false, channel_.in()}, out_header_);
  out_header_left_ = kPieceHeaderBytes;
  out_left_ = bytes;
  place_ = bytes == 0 ? 0 : channel_.out().placeOf(out_);
  return true;
}

std::optional<uint64_t> Connection::next() {
  if (out_header_left_ + out_left_ > 0 || pipe_->holds()) return place_;
  const auto lock = channel_.lock();
  if (out_ == channel_.out().end()) return {};
  return channel_.out().placeOf(out_);
}

std::optional<std::string> Connection::unblock() {
  if (auto over = pipe_->flush()) return over;
  blocked_.reset();
  if (pipe_->holds()) {
    blocked_ = Clock::now();  // it has taken some of it
  } else if (out_header_left_ + out_left_ == 0) {
    const auto lock = channel_.lock();
    channel_.wrote(out_);
  }
  return {};
}

std::optional<std::string> Connection::write() {
  const auto lock = channel_.lock();
  if (pipe_->holds()) {
    if (auto over = pipe_->flush()) return over;
  } else if (out_header_left_ + out_left_ == 0 && !nextPiece(false)) {
    return {};
  }
  while (out_header_left_ + out_left_ > 0) {
    std::array<iovec, kParts> parts;
    size_t count = 0;
    if (out_header_left_ > 0)
      parts[count++] = {out_header_.data() + kPieceHeaderBytes - out_header_left_, out_header_left_};
    const size_t of_stream = channel_.out().gather(out_, out_left_, std::span(parts).subspan(count));
    if (out_left_ > 0 && of_stream == 0) return "the channel has ended";
    const Moved written = pipe_->write(std::span(parts).first(count + of_stream));
    if (written.over) return written.over;
    if (written.bytes == 0) break;
    spoke_ = Clock::now();
    sent_ += written.bytes;
    const size_t of_header = std::min(written.bytes, out_header_left_);
    out_header_left_ -= of_header;
    out_left_ -= written.bytes - of_header;
    out_ += written.bytes - of_header;
  }
  const bool all = out_header_left_ + out_left_ == 0 && !pipe_->holds();
  if (all) channel_.wrote(out_);
  if (!all && !blocked_) blocked_ = Clock::now();
  return {};
}

// So many bytes have come for where read() has put them.
std::optional<std::string> Connection::take(size_t bytes) {
  if (in_left_ > 0) {
    channel_.arrived(bytes);
    in_left_ -= bytes;
    return {};
  }
  in_header_have_ += bytes;
  if (in_header_have_ < kPieceHeaderBytes) return {};
  in_header_have_ = 0;
  const Piece piece = parsePiece(in_header_);
  channel_.out().received(piece.received);
  in_left_ = piece.bytes;
  if (!piece.last) return {};
  said_last_ = true;
  return "the peer has ended the channel";
}

std::optional<std::string> Connection::read() {
  const auto lock = channel_.lock();
  for (size_t turn = kTurnBytes;;) {
    std::span<std::byte> room = std::span(in_header_).subspan(in_header_have_);
    if (in_left_ > 0) {
      room = channel_.room();
      room = room.first(std::min(room.size(), in_left_));
    }
    const Moved got = pipe_->read(room, turn);
    if (got.bytes == 0) {
      if (!got.over) pipe_->expect(in_left_ > 0 ? in_left_ : kPieceHeaderBytes - in_header_have_);
      return got.over;
    }
    heard_ = Clock::now();
    received_ += got.bytes;
    if (auto over = take(got.bytes)) return over;
  }
}

bool Connection::isQuiet() const {
  return Clock::now() - heard_ > kSilence / 2;
}

std::optional<std::string> Connection::tick() {
  const auto now = Clock::now();
  if (now >= judge_at_) {
    manner_ = judge(pipe_->fd(), is_one_of_several_);
    judge_at_ = now + kJudge;
  }
  if (now - heard_ > kSilence) return "nothing was heard for 1.5 s";
  if (now - spoke_ < kHeartbeat || out_header_left_ + out_left_ > 0) return {};
  {
    const auto lock = channel_.lock();
    nextPiece(true);
  }
  return write();
}

bool Connection::sayLast() {
  if (out_header_left_ + out_left_ > 0) return false;  // in the middle of a piece; the peer will find out by dialling
  std::array<std::byte, kPieceHeaderBytes> header;
  {
    const auto lock = channel_.lock();
    tcp::write(Piece{0, true, channel_.in()}, header);
  }
  const iovec part{header.data(), header.size()};
  return pipe_->write({&part, 1}).bytes == header.size() && !pipe_->holds();
}

void LastBytes::add(Fd fd, Clock::time_point deadline) {
  ::shutdown(fd.get(), SHUT_WR);
  sockets_.push_back({std::move(fd), deadline});
}

void LastBytes::waitFor(std::vector<pollfd>& waits) const {
  for (const Socket& one : sockets_)
    waits.push_back({one.fd.get(), POLLIN, 0});
}

void LastBytes::closeDone() {
  std::array<std::byte, 4096> unread;
  sockets_.remove_if([&](const Socket& one) {
    ssize_t count = 1;
    for (size_t i = 0; i < kLastReads && count > 0; ++i)
      count = ::recv(one.fd.get(), unread.data(), unread.size(), MSG_DONTWAIT);
    const bool is_over = count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
    int on_their_way = 0;
    return is_over || Clock::now() > one.deadline ||
           (::ioctl(one.fd.get(), SIOCOUTQ, &on_their_way) == 0 && on_their_way == 0);
  });
}

}  // namespace lowcomm::tcp
