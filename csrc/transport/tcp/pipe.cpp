#include "transport/tcp/pipe.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace lowcomm::tcp {
namespace {

constexpr size_t kMostExpected = 64 * 1024;

Moved failed() {
  if (wouldBlock()) return {};
  return {0, std::strerror(errno)};
}

}  // namespace

Moved Pipe::read(std::span<std::byte> room, size_t& turn) {
  if (ahead_begin_ < ahead_end_) {
    const size_t bytes = std::min(room.size(), ahead_end_ - ahead_begin_);
    std::memcpy(room.data(), ahead_.data() + ahead_begin_, bytes);
    ahead_begin_ += bytes;
    return {bytes};
  }
  if (turn == 0) return {};
  const size_t here = std::min(room.size(), turn);
  std::array<iovec, 2> parts{{{room.data(), here}, {ahead_.data(), ahead_.size()}}};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = reads_ahead_ ? 2 : 1;
  const ssize_t count = ::recvmsg(fd(), &message, MSG_DONTWAIT);
  if (count == 0) return {0, "the peer has closed the connection"};
  if (count < 0) return failed();
  const size_t bytes = std::min<size_t>(count, here);
  ahead_begin_ = 0;
  ahead_end_ = count - bytes;
  turn -= bytes;
  return {bytes};
}

// Without it a slow link's receiver wakes once a segment, and most of its CPU goes into that.
void Pipe::expect(size_t bytes) {
  const int expected = static_cast<int>(std::min<size_t>(bytes, kMostExpected));
  if (expected == std::exchange(expected_, expected)) return;
  ::setsockopt(fd(), SOL_SOCKET, SO_RCVLOWAT, &expected, sizeof(expected));
}

Moved Pipe::write(std::span<const iovec> parts) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  const ssize_t count = ::sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  return count < 0 ? failed() : Moved{static_cast<size_t>(count)};
}

}  // namespace lowcomm::tcp
