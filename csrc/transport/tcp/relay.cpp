#include "transport/tcp/relay.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <utility>

#include "transport/tcp/pace.h"

namespace lowcomm::tcp {
namespace {

// Whether `two` is the rank that `one` asks for.
bool mirrors(const Hello& one, const Hello& two) {
  return one.group == two.group && one.channel == two.channel && one.from == two.to && one.to == two.from;
}

}  // namespace

size_t Relay::countOf(const std::string& host) const {
  size_t count = std::count_if(waiting_.begin(), waiting_.end(), [&](const Waiting& one) { return one.host == host; });
  for (const Pair& pair : pairs_)
    count += (pair.a.host == host) + (pair.b.host == host);
  return count;
}

bool Relay::admit(Fd fd, const Hello& request, const std::string& host) {
  const auto same = [&](const Waiting& one) {
    return one.request.group == request.group && one.request.channel == request.channel &&
           one.request.from == request.from && one.request.to == request.to;
  };
  waiting_.remove_if(same);
  if (!host.empty() && countOf(host) >= kOfAHost) return false;
  Waiting mine{std::move(fd), request, host, Clock::now() + kWithin};
  const auto other =
      std::find_if(waiting_.begin(), waiting_.end(), [&](const Waiting& one) { return mirrors(one.request, request); });
  if (other == waiting_.end()) {
    if (waiting_.size() >= kMostWaiting) return false;
    waiting_.push_back(std::move(mine));
    return true;
  }
  Waiting first = std::move(*other);
  waiting_.erase(other);
  if (pairs_.size() >= kMostJoined) return false;
  join(std::move(first), std::move(mine));
  return true;
}

void Relay::join(Waiting first, Waiting second) {
  for (const Waiting* one : {&first, &second}) {
    Hello answer = one->request;
    std::swap(answer.from, answer.to);
    std::array<std::byte, kHelloBytes> bytes;
    write(answer, bytes);
    if (::send(one->fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) != kHelloBytes) return;
    judge(one->fd.get());
  }
  pairs_.emplace_back();
  Pair& pair = pairs_.back();
  for (auto [side, one] : {std::pair(&pair.a, &first), std::pair(&pair.b, &second)}) {
    side->fd = std::move(one->fd);
    side->host = std::move(one->host);
  }
}

void Relay::waitFor(std::vector<pollfd>& waits) const {
  for (const Waiting& one : waiting_)
    waits.push_back({one.fd.get(), POLLIN, 0});
  for (const Pair& pair : pairs_) {
    const auto add = [&](const Side& side, const Side& other) {
      const int in = side.end < kBufferBytes && !side.is_over ? POLLIN : 0;
      const int out = other.end > other.begin && !side.write_closed ? POLLOUT : 0;
      // Negative: left out by poll(), which would tell of a closed connection again and again.
      waits.push_back({in | out ? side.fd.get() : ~side.fd.get(), static_cast<short>(in | out), 0});
    };
    add(pair.a, pair.b);
    add(pair.b, pair.a);
  }
}

void Relay::ready(std::span<const pollfd> waits) {
  size_t next = 0;
  const auto isReady = [&](const Fd& fd) {
    const bool is_next = next < waits.size() && (waits[next].fd == fd.get() || waits[next].fd == ~fd.get());
    if (!is_next) return false;  // it came after poll()
    return waits[next++].revents != 0;
  };
  // A waiting rank sends nothing until it is answered: one that is readable has hung up, or is not a rank.
  waiting_.remove_if([&](const Waiting& one) { return isReady(one.fd); });
  pairs_.remove_if([&](Pair& pair) {
    const bool a = isReady(pair.a.fd), b = isReady(pair.b.fd);
    if (!a && !b) return false;
    pass(pair.a, pair.b);
    pass(pair.b, pair.a);
    if (!pair.deadline && (pair.a.is_over || pair.b.is_over)) pair.deadline = Clock::now() + kWithin;
    return pair.isOver();
  });
}

// A connection that is closed with bytes unread is reset, and what was on its way to its other end is lost. So the end
// of one is the other's to answer, and until then what it says is read.
void Relay::pass(Side& from, Side& to) {
  if (from.end < kBufferBytes && !from.is_over) {
    const ssize_t count = ::recv(from.fd.get(), from.buffer.data() + from.end, kBufferBytes - from.end, MSG_DONTWAIT);
    if (count == 0 || (count < 0 && !wouldBlock())) from.is_over = true;
    if (count > 0) from.end += count;
  }
  if (from.begin < from.end && !to.write_closed) {
    const ssize_t count =
        ::send(to.fd.get(), from.buffer.data() + from.begin, from.end - from.begin, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && !wouldBlock()) to.write_closed = true;
    if (count > 0) from.begin += count, bytes_ += count;
  }
  if (from.begin < from.end && !to.write_closed) return;
  from.begin = from.end = 0;
  if (from.is_over && !std::exchange(to.is_told, true)) ::shutdown(to.fd.get(), SHUT_WR);
}

void Relay::tick() {
  const auto now = Clock::now();
  waiting_.remove_if([&](const Waiting& one) { return now > one.deadline; });
  pairs_.remove_if([&](const Pair& pair) { return pair.deadline && now > *pair.deadline; });
}

}  // namespace lowcomm::tcp
