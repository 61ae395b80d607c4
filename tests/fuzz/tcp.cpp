// The bytes between endpoints over TCP: a hello, a piece's header, and a channel's stream, in parts of sizes that the
// input names. Halfway this end closes a tag.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/error.h"
#include "target.h"
#include "transport/tcp/message_stream.h"
#include "transport/tcp/wire.h"

namespace {

using namespace lowcomm;

template <size_t size>
std::array<std::byte, size> filled(const uint8_t* data, size_t bytes) {
  std::array<std::byte, size> filled{};
  std::memcpy(filled.data(), data, std::min(size, bytes));
  return filled;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  try {
    tcp::parseHello(filled<tcp::kHelloBytes>(data, size));
  } catch (const WireError&) {
  }
  try {
    tcp::parsePiece(filled<tcp::kPieceHeaderBytes>(data, size));
  } catch (const WireError&) {
  }
  // A receive of 100 bytes is posted for tag 1, one message is under way, and others come unasked.
  tcp::MessageStream channel(1);
  std::vector<std::byte> room(100), out(10);
  channel.send(0, out);
  channel.receive(1, room);
  channel.out().promise(0, channel.out().end());
  channel.out().received(channel.out().end());
  const size_t most = 1 + data[0];
  size_t at = 1;
  try {
    const auto lock = channel.lock();
    while (at < size) {
      const std::span<std::byte> next = channel.room();
      fuzz::require(!next.empty());
      const size_t bytes = std::min({next.size(), most, size - at});
      std::memcpy(next.data(), data + at, bytes);
      channel.arrived(bytes);
      at += bytes;
    }
    fuzz::require(channel.in() == size - 1);
  } catch (const WireError&) {
  }
  channel.fail(TransportError::Kind::closed, "over");
  return 0;
}
