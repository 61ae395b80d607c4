#include "transport/tcp/forwarder.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/process.h"

namespace lowcomm::tcp {
namespace {

using std::chrono::milliseconds;

// An end of a connection, by ::getsockname or ::getpeername; empty where `fd` is no connection of TCP.
std::string nameOf(int (*ask)(int, sockaddr*, socklen_t*), int fd) {
  Address address;
  address.size = sizeof(address.storage);
  if (ask(fd, address.get(), &address.size) != 0) return "";
  if (address.storage.ss_family != AF_INET && address.storage.ss_family != AF_INET6) return "";
  // Both families have the port at the same place. torch's sockets are IPv6's, also to an IPv4 address.
  return networkOf(address) + " " + std::to_string(reinterpret_cast<const sockaddr_in*>(address.get())->sin_port);
}

// Whether the other end of a connection is a socket of this process, which both names show.
bool isOurs(int fd) {
  const std::string theirs = nameOf(::getpeername, fd), mine = nameOf(::getsockname, fd);
  std::error_code error;
  for (std::filesystem::directory_iterator at("/proc/self/fd", error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename();
    int other = -1;
    std::from_chars(name.data(), name.data() + name.size(), other);
    if (!theirs.empty() && nameOf(::getsockname, other) == theirs && nameOf(::getpeername, other) == mine) return true;
  }
  return false;
}

}  // namespace

Forwarder::Forwarder(std::shared_ptr<Endpoint> endpoint, std::string what)
    : endpoint_(std::move(endpoint)), what_(std::move(what)) {
  thread_ = std::thread([this] { run(); });
}

Forwarder::~Forwarder() {
  stop_ = true;
  waker_.wake();
  thread_.join();
  streams_.splice(streams_.end(), added_);
  for (const Stream& stream : streams_)
    endpoint_->remove(stream.link);  // from now on nothing of it is touched, nor wakes this
}

void Forwarder::add(Fd socket, std::shared_ptr<Link> link, bool listens) {
  {
    std::lock_guard lock(mutex_);
    added_.push_back({std::move(socket), std::move(link), listens});
  }
  waker_.wake();
}

void Forwarder::run() {
  sigset_t all;  // signals are for the program's own threads
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  while (!stop_)
    turn();
}

// Waits until something may be done, and does it.
void Forwarder::turn() {
  std::vector<pollfd> waits{waker_.waitsFor()};
  for (Stream& stream : streams_) {
    const int in = !stream.is_read && stream.sending.size() < kMessages ? POLLIN : 0;
    const int out = stream.begin < stream.end ? POLLOUT : 0;
    if (in | out) waits.push_back({stream.socket.get(), static_cast<short>(in | out), 0});
  }
  const bool can_wait = ::poll(waits.data(), waits.size(), -1) >= 0 || errno == EINTR;
  if (!can_wait) {  // the streams end, and it may be so again
    logLine(what_ + ": poll: expected to wait for descriptors, got: " + std::strerror(errno));
    std::this_thread::sleep_for(milliseconds(500));
  }
  waker_.clear(waits[0].revents);
  {
    std::lock_guard lock(mutex_);
    streams_.splice(streams_.end(), added_);
  }
  for (auto stream = streams_.begin(); stream != streams_.end();) {
    if (can_wait && move(*stream)) {
      ++stream;
    } else {
      endpoint_->remove(stream->link);
      stream = streams_.erase(stream);
    }
  }
}

// As far as the socket and the channel allow it. Returns whether the stream goes on.
bool Forwarder::move(Stream& stream) {
  try {
    if (stream.listens && !enter(stream)) return true;
    drain(stream);
    fill(stream);
    return !stream.is_read || !stream.sending.empty();
  } catch (const std::exception& error) {  // the channel's, or a message that no peer of this version sends
    if (!what_.empty() && std::strstr(error.what(), kChannelClosed) == nullptr) logLine(what_ + ": " + error.what());
    return false;
  }
}

// Returns whether the stream has its connection.
bool Forwarder::enter(Stream& stream) {
  if (stream.link->channel.failed()) throw TransportError(TransportError::Kind::closed, 0, kChannelClosed);
  Fd fd(::accept4(stream.socket.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!fd && !wouldBlock()) std::this_thread::sleep_for(milliseconds(20));  // no descriptor may be left
  if (!fd || !isOurs(fd.get())) return false;
  stream.socket = std::move(fd);
  stream.listens = false;
  return true;
}

// From the channel to the socket.
void Forwarder::drain(Stream& stream) {
  for (;;) {
    while (stream.begin < stream.end) {
      const ssize_t count = ::send(stream.socket.get(), stream.come.data() + stream.begin, stream.end - stream.begin,
                                   MSG_NOSIGNAL | MSG_DONTWAIT);
      if (count < 0 && wouldBlock()) return;
      if (count < 0) throw TransportError(TransportError::Kind::closed, 0, kChannelClosed);  // by the socket
      stream.begin += count;
    }
    if (!stream.receiving)
      stream.receiving = endpoint_->receive(stream.link->channel, 0, stream.come, [this] { waker_.wake(); });
    if (!stream.receiving->ended()) return;
    stream.begin = 0;
    stream.end = std::exchange(stream.receiving, nullptr)->wait(0, milliseconds(0));
  }
}

// From the socket to the channel.
void Forwarder::fill(Stream& stream) {
  while (!stream.sending.empty() && stream.sending.front().delivery->ended()) {
    stream.sending.front().delivery->wait(0, milliseconds(0));
    stream.sending.pop_front();
  }
  while (!stream.is_read && stream.sending.size() < kMessages) {
    const ssize_t count = ::recv(stream.socket.get(), read_.data(), read_.size(), MSG_DONTWAIT);
    if (count < 0 && wouldBlock()) break;
    if (count <= 0) {
      stream.is_read = true;
      break;
    }
    Sending& next = stream.sending.emplace_back();
    next.bytes.assign(read_.begin(), read_.begin() + count);
    next.delivery = endpoint_->send(stream.link->channel, 0, next.bytes, [this] { waker_.wake(); });
  }
}

}  // namespace lowcomm::tcp
