#include "transport/tcp/connection.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "transport/tcp/congestion.h"

namespace lowcomm::tcp {
namespace {

using namespace std::chrono_literals;

constexpr auto kHeartbeat = 250ms, kSilence = 1500ms;
constexpr size_t kTurnBytes = 1 << 20;
constexpr size_t kParts = 16;
constexpr int kUnsentBytes = 16 * 1024;  // more would only queue in the kernel, before what is more urgent
constexpr auto kJudge = 1s;

std::string errorText() {
  return std::strerror(errno);
}

bool wouldBlock() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

}  // namespace

Connection::Connection(Fd fd, Channel& channel, uint64_t from) : fd_(std::move(fd)), channel_(channel), out_(from) {
  const int on = 1;
  ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof(kUnsentBytes));
}

// Under the channel's lock. Bytes of the stream that a piece has promised are there until the peer has received them.
bool Connection::nextPiece(bool even_empty) {
  const size_t bytes = std::min<uint64_t>(kPieceBytes, channel_.outEnd() - out_);
  if (bytes == 0 && !even_empty) return false;
  tcp::write(Piece{static_cast<uint32_t>(bytes), false, channel_.in()}, out_header_);
  out_header_left_ = kPieceHeaderBytes;
  out_left_ = bytes;
  place_ = bytes == 0 ? 0 : channel_.placeOf(out_);
  return true;
}

std::optional<uint64_t> Connection::next() {
  if (out_header_left_ + out_left_ > 0) return place_;
  const auto lock = channel_.lock();
  if (out_ == channel_.outEnd()) return {};
  return channel_.placeOf(out_);
}

std::optional<std::string> Connection::write() {
  const auto lock = channel_.lock();
  if (out_header_left_ + out_left_ == 0 && !nextPiece(false)) return {};
  while (out_header_left_ + out_left_ > 0) {
    std::array<iovec, kParts> parts;
    size_t count = 0;
    if (out_header_left_ > 0)
      parts[count++] = {out_header_.data() + kPieceHeaderBytes - out_header_left_, out_header_left_};
    const size_t of_stream = channel_.gather(out_, out_left_, std::span(parts).subspan(count));
    if (out_left_ > 0 && of_stream == 0) return "the channel has ended";
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count + of_stream;
    const ssize_t written = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written < 0) {
      if (!wouldBlock()) return errorText();
      if (!blocked_) blocked_ = Clock::now();
      return {};
    }
    spoke_ = Clock::now();
    const size_t of_header = std::min<size_t>(written, out_header_left_);
    out_header_left_ -= of_header;
    out_left_ -= written - of_header;
    out_ += written - of_header;
  }
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
  channel_.received(piece.received);
  in_left_ = piece.bytes;
  if (!piece.last) return {};
  said_last_ = true;
  return "the peer has ended the channel";
}

std::optional<std::string> Connection::read() {
  const auto lock = channel_.lock();
  for (size_t turn = 0; turn < kTurnBytes;) {
    std::span<std::byte> room = std::span(in_header_).subspan(in_header_have_);
    if (in_left_ > 0) {
      room = channel_.room();
      room = room.first(std::min(room.size(), in_left_));
    }
    const ssize_t count = ::recv(fd_.get(), room.data(), room.size(), MSG_DONTWAIT);
    if (count == 0) return "the peer has closed the connection";
    if (count < 0) return wouldBlock() ? std::nullopt : std::optional(errorText());
    heard_ = Clock::now();
    turn += count;
    if (auto over = take(count)) return over;
  }
  return {};
}

std::optional<std::string> Connection::tick() {
  const auto now = Clock::now();
  if (now >= judge_at_) {
    judgeCongestion(fd_.get());
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

void Connection::sayLast() {
  if (out_header_left_ + out_left_ > 0) return;  // in the middle of a piece; the peer will find out by dialling
  std::array<std::byte, kPieceHeaderBytes> header;
  {
    const auto lock = channel_.lock();
    tcp::write(Piece{0, true, channel_.in()}, header);
  }
  ::send(fd_.get(), header.data(), header.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace lowcomm::tcp
