#include "transport/tcp/pipe.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace lowcomm::tcp {
namespace {

constexpr size_t kMostExpected = 64 * 1024;

Moved failed() {
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {};
  return {0, std::strerror(errno)};
}

}  // namespace

Moved Pipe::read(std::span<std::byte> room, size_t& turn) {
  if (turn == 0) return {};
  const ssize_t count = ::recv(fd(), room.data(), std::min(room.size(), turn), MSG_DONTWAIT);
  if (count == 0) return {0, "the peer has closed the connection"};
  if (count < 0) return failed();
  turn -= count;
  return {static_cast<size_t>(count)};
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
