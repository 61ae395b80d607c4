#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/dtype.h"
#include "codec/spec.h"

namespace lowcomm {

inline constexpr size_t kFrameHeaderBytes = 64;
inline constexpr uint8_t kWireVersion = 2;

enum class FrameKind : uint8_t { data = 0, error = 1, control = 2, hello = 3 };

// The 64-byte little-endian header before every payload (FORMAT.md, "Frames"). Fields not listed here (magic, CRC) are
// written by sealFrame and checked by openFrame.
struct FrameHeader {
  uint8_t version = kWireVersion;
  FrameKind kind = FrameKind::data;
  CodecId codec = CodecId::none;
  uint8_t bits = 0;
  uint8_t flags = 0;  // frameFlags of the codec; 0 in a layout
  DType dtype = DType::opaque;
  uint32_t bucket = 0;
  uint64_t elements = 0;  // elements in this frame
  uint64_t first = 0;     // index of the frame's first element in the message
  uint32_t sequence = 0;  // the op's number in its group
  uint32_t epoch = 0;     // the group's incarnation: an older one is fenced off
  uint32_t channel = 0;
  uint32_t state_version = 0;
  uint64_t key_hash = 0;
  uint32_t payload_bytes = 0;

  bool operator==(const FrameHeader&) const = default;
};

// Writes header and CRC-32C in front of the payload that already stands at frame[64...].
// frame.size() must be 64 + header.payload_bytes (ValueError otherwise).
void sealFrame(std::span<std::byte> frame, const FrameHeader& header);

// Writes a frame whose payload is `text`, into a buffer that has room for it; `header` except for payload_bytes.
// Returns the frame's bytes.
size_t sealText(std::byte* frame, FrameHeader header, const std::string& text);

// Checks what can be checked without knowing the op: magic, version, kind, codec, dtype and flag numbers, reserved
// fields, payload length against the bytes at hand, CRC-32C. `received` may be longer than the frame (a receive
// buffer). Throws WireError naming the field, what was expected and what was got. Reads nothing past received.size().
FrameHeader openFrame(std::span<const std::byte> received);

// The payload of an opened frame, a view into `received`.
std::span<const std::byte> framePayload(std::span<const std::byte> received, const FrameHeader& header);

// Throws WireError naming the first field of `got` that differs from `want`, with both values.
void expectFrame(const FrameHeader& got, const FrameHeader& want);

}  // namespace lowcomm
