// The frame parser, which reads what a peer sent. The CRC would keep every made-up frame out, so it is put right first;
// with an odd number of bytes it is left as it is.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/hashes.h"
#include "target.h"
#include "wire/frame.h"

namespace {

constexpr size_t kPayloadBytesAt = 56, kCrcAt = 60;

void putCrcRight(std::span<std::byte> bytes) {
  if (bytes.size() < lowcomm::kFrameHeaderBytes) return;
  uint32_t payload;
  std::memcpy(&payload, bytes.data() + kPayloadBytesAt, 4);
  payload = std::min<uint32_t>(payload, static_cast<uint32_t>(bytes.size() - lowcomm::kFrameHeaderBytes));
  std::memcpy(bytes.data() + kPayloadBytesAt, &payload, 4);
  uint32_t crc = lowcomm::crc32c(bytes.data(), kCrcAt);
  crc = lowcomm::crc32c(bytes.data() + lowcomm::kFrameHeaderBytes, payload, crc);
  std::memcpy(bytes.data() + kCrcAt, &crc, 4);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lowcomm;
  // A vector of its own: the sanitizer sees a read past its end.
  std::vector<std::byte> bytes(size);
  std::copy_n(reinterpret_cast<const std::byte*>(data), size, bytes.begin());
  if (size % 2 == 0) putCrcRight(bytes);
  try {
    const FrameHeader header = openFrame(bytes);
    const auto payload = framePayload(bytes, header);
    fuzz::require(payload.size() == header.payload_bytes);
    expectFrame(header, header);
    // A frame that was accepted is one that a writer writes.
    const size_t whole = kFrameHeaderBytes + payload.size();
    std::vector<std::byte> again(whole);
    std::copy(payload.begin(), payload.end(), again.begin() + kFrameHeaderBytes);
    sealFrame(again, header);
    fuzz::require(std::equal(again.begin(), again.end(), bytes.begin()));
  } catch (const WireError&) {
  }
  return 0;
}
