#include "transport/tcp/strangers.h"

#include <sys/socket.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/process.h"

namespace lowcomm::tcp {
namespace {

constexpr size_t kTurnBytes = 1024;  // a Hello with a code, and what TLS puts around it
constexpr std::byte kHelloBegins{0x0a};

}  // namespace

void Strangers::makeRoom(const std::string& host) {
  const auto nothing_shown = [](const Stranger& stranger) { return !stranger.has_secret; };
  const auto of_host = [&](const Stranger& stranger) { return nothing_shown(stranger) && stranger.host == host; };
  Place gone = strangers_.end();
  if (static_cast<size_t>(std::count_if(strangers_.begin(), strangers_.end(), of_host)) >= kOfAHost) {
    gone = std::find_if(strangers_.begin(), strangers_.end(), of_host);
  } else if (strangers_.size() >= kHalfOpen) {
    gone = std::find_if(strangers_.begin(), strangers_.end(), nothing_shown);
    if (gone == strangers_.end()) gone = strangers_.begin();
  } else {
    return;
  }
  last_host_ = gone->host;
  count(Kind::crowded);
  strangers_.erase(gone);
}

void Strangers::admit(Fd fd, const Address& from) {
  const std::string host = networkOf(from);
  makeRoom(host);
  SecurePipe* secure = nullptr;
  std::unique_ptr<Pipe> pipe;
  if (tls_) {
    auto made = tls_->accept(std::move(fd), incarnation_);
    secure = made.get();
    pipe = std::move(made);
  } else {
    pipe = std::make_unique<Pipe>(std::move(fd));
  }
  strangers_.push_back({std::move(pipe), secure, host, Clock::now() + kWithin});
}

void Strangers::waitFor(std::vector<pollfd>& waits) const {
  for (const Stranger& stranger : strangers_)
    waits.push_back({stranger.pipe->fd(), static_cast<short>(POLLIN | (stranger.pipe->holds() ? POLLOUT : 0)), 0});
}

Strangers::PendingHello Strangers::hear(std::span<const pollfd> waits) {
  PendingHello heard;
  size_t work = 0;
  Place stranger = strangers_.begin();
  for (const pollfd& wait : waits) {
    bool over = false;
    if (wait.revents && work == kHeardATurn) {
      heard.all = false;
    } else if (wait.revents) {
      ++work;
      over = hear(*stranger, heard);
    }
    if (!over && Clock::now() > stranger->deadline) {  // also where it speaks on and on
      over = true;
      last_host_ = stranger->host;
      count(Kind::silent);
    }
    stranger = over ? strangers_.erase(stranger) : std::next(stranger);
  }
  return heard;
}

bool Strangers::hear(Stranger& stranger, PendingHello& heard) {
  Pipe& pipe = *stranger.pipe;
  const auto noMember = [&](Kind kind) {
    last_host_ = stranger.host;
    count(kind);
    return true;
  };
  if (stranger.secure && !stranger.has_spoken) {
    std::byte first{};
    if (::recv(pipe.fd(), &first, 1, MSG_PEEK | MSG_DONTWAIT) == 1) {
      stranger.has_spoken = true;
      if (first == kHelloBegins) {  // not TLS, whose first byte is 22: it may ask for the relay, which reads no secrets
        stranger.pipe = std::make_unique<Pipe>(pipe.release());
        stranger.secure = nullptr;
        return hear(stranger, heard);
      }
    }
  }
  if (!pipe.isOpen()) {
    if (pipe.open()) {
      if (pipe.wrong() != Pipe::Wrong::secret) return noMember(Kind::other);
      heard.other_secrets.push_back(*stranger.secure->identity());
      return noMember(Kind::other_secret);
    }
    stranger.has_secret = stranger.secure->identity().has_value();
    if (!pipe.isOpen()) return false;
  }
  const std::span<std::byte> said(stranger.said);
  try {
    Hello hello;
    while (stranger.have < stranger.expected) {
      size_t turn = kTurnBytes;
      const Moved got = pipe.read(said.subspan(stranger.have, stranger.expected - stranger.have), turn);
      if (got.over) return noMember(Kind::other);
      if (got.bytes == 0) return false;
      stranger.have += got.bytes;
      if (stranger.have < kHelloBytes) continue;
      hello = parseHello(said.first<kHelloBytes>());
      if (hello.relays && !stranger.secure) stranger.expected = said.size();
    }
    if (tls_ && !stranger.secure && !hello.relays) return noMember(Kind::other);
    if (stranger.secure && (hello.relays || !belongs(hello, *stranger.secure->identity())))
      return noMember(Kind::other);
    RelayCode code;
    std::copy_n(said.begin() + kHelloBytes, code.size(), code.begin());
    heard.introductions.push_back({std::move(stranger.pipe), hello, code, stranger.secure ? "" : stranger.host});
    return true;
  } catch (const WireError&) {
    return noMember(Kind::other);
  }
}

void Strangers::report() {
  const uint64_t all = std::accumulate(counts_.begin(), counts_.end(), uint64_t{0});
  if (all == 0) return;
  const auto now = Clock::now();
  if (!log_at_) log_at_ = now + log_every_;
  if (now < *log_at_) return;
  constexpr const char* kSaid[kKinds] = {" said too little in 3 s", " spoke otherwise or hung up",
                                         " had another secret", " belonged to no group here",
                                         " gave way to later ones"};
  std::string text = "port " + port_ + ": " + std::to_string(all) + " connections from outside came to nothing:";
  for (size_t i = 0; i < kKinds; ++i) {
    if (counts_[i] > 0) text += (text.back() == ':' ? " " : ", ") + std::to_string(counts_[i]) + kSaid[i];
  }
  if (!last_host_.empty()) text += "; the last from " + last_host_;
  logLine(text);
  counts_ = {};
  log_at_.reset();
}

}  // namespace lowcomm::tcp
