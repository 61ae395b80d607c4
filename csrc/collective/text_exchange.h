#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "collective/context.h"
#include "transport/transport.h"
#include "wire/frame.h"
#include "wire/key_values.h"

namespace lowcomm {

class OpContext;

// The fields in a frame of this op that a peer has sent, counted as received. Throws WireError for any other frame.
KeyValues fieldsIn(OpContext& op, FrameKind kind, std::span<const std::byte> frame);

// A frame of fields each way between this rank and a peer. A failed transfer throws TransferError, a frame that is not
// one of this op's PeerError.
class TextExchange {
 public:
  // `kind` and `tag` are equal on both sides.
  TextExchange(OpContext& op, int peer, FrameKind kind, Lane lane, uint32_t tag);

  // Posts the receive. Call it before the peer sends.
  void post();

  // Hands this rank's text to the transport.
  void send(const std::string& text);

  // Waits for the peer's fields and returns them. `doing` and `deadline` as OpContext::wait.
  KeyValues receive(const char* doing, std::optional<std::chrono::milliseconds> deadline = std::nullopt);

  // Waits until this rank's text has been sent.
  void settle(const char* doing);

  int peer() const { return peer_; }

 private:
  OpContext& op_;
  const int peer_;
  const FrameKind kind_;
  const Lane lane_;
  const uint32_t tag_;
  BufferPool::Buffer out_, in_;
  std::unique_ptr<Transfer> sending_, receiving_;
};

}  // namespace lowcomm
