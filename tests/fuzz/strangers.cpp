// What a stranger sends to a port where there is a secret: the input as a PSK identity, as the beginning of a
// ClientHello, and as all that comes by a connection, in two parts.
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "target.h"
#include "transport/tcp/secure.h"
#include "transport/tcp/strangers.h"
#include "transport/tcp/wire.h"

namespace {

using namespace lowcomm;

constexpr uint64_t kIncarnation = 77;  // as in seeds.cpp

std::shared_ptr<tcp::Tls> tls() {
  static const auto made =
      std::make_shared<tcp::Tls>(tcp::Secret("b0pBTzHWtmPlKzjrLn7SdrZxdFKFEE9lbYgOxDY3xPI", "fuzz"));
  return made;
}

void asIdentity(std::span<const std::byte> bytes) {
  try {
    const tcp::Identity identity = tcp::parseIdentity(bytes);
    std::vector<std::byte> again(tcp::kIdentityBytes);
    tcp::write(identity, std::span(again).first<tcp::kIdentityBytes>());
    fuzz::require(std::equal(again.begin(), again.end(), bytes.begin(), bytes.end()));
  } catch (const WireError&) {
  }
}

// The length is said once, however little there is, and never more than is waited for.
void asClientHello(std::span<const std::byte> bytes) {
  std::optional<size_t> said;
  for (size_t have = 0; have <= std::min<size_t>(bytes.size(), 16); ++have) {
    try {
      const auto now = tcp::clientHelloBytes(bytes.first(have));
      fuzz::require(!said || said == now);
      if (now) fuzz::require(*now <= tcp::kMostClientHelloBytes);
      said = now;
    } catch (const WireError&) {
      return;
    }
  }
}

void asConnection(std::span<const std::byte> bytes) {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0) return;
  const tcp::Fd theirs(fds[1]);
  tcp::Strangers strangers("0", tls(), kIncarnation);
  strangers.admit(tcp::Fd(fds[0]), tcp::Address{});
  const size_t first = bytes.empty() ? 0 : std::to_integer<size_t>(bytes[0]);
  for (const auto part : {bytes.first(std::min(first, bytes.size())), bytes.subspan(std::min(first, bytes.size()))}) {
    if (!part.empty()) ::send(theirs.get(), part.data(), part.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    for (int turn = 0; turn < 3 && strangers.size() > 0; ++turn) {
      std::vector<pollfd> waits;
      strangers.waitFor(waits);
      waits[0].revents = POLLIN;
      fuzz::require(strangers.hear(waits).introductions.empty());
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  asIdentity(bytes);
  asClientHello(bytes);
  if (!tcp::tlsLibrary().empty()) asConnection(bytes);
  return 0;
}
