#include "collective/plan.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "base/error.h"

namespace lowcomm {
namespace {

// The largest granule of any codec: a bucket of 65,536 elements at 8 bits with its metadata, or 512 elements of 8
// bytes.
constexpr size_t kLargestGranule = 65536 + 64;
constexpr size_t kPartUnit = 64;  // payloads are multiples of it, so that all parts are

// The largest count whose encoding fits `room`, a multiple of the granularity unless it is all that is left.
uint64_t fitting(const Codec& codec, DType dtype, uint64_t left, size_t room) {
  if (codec.encodedBytes(left, dtype) <= room) return left;
  const uint64_t granule = codec.granularity();
  uint64_t low = 0, high = left / granule;
  while (low < high) {
    const uint64_t middle = low + (high - low + 1) / 2;
    if (codec.encodedBytes(middle * granule, dtype) <= room) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low * granule;
}

// Bytes of a payload that is cut as bytes, of which `left` are still to go, into a frame that already has `used`.
size_t partFitting(size_t left, size_t chunk_bytes, size_t used) {
  const size_t room = used < chunk_bytes ? (chunk_bytes - used) / kPartUnit * kPartUnit : 0;
  return std::min(left, room);
}

}  // namespace

void Run::encode(std::span<std::byte> payload, const void* src, DType dtype, const Draws& draws,
                 const std::string& of) const {
  countInMessage(of, [&] { codec->encode(payload, src, dtype, offset, count, draws); });
}

size_t frameCapacity(size_t chunk_bytes) {
  return kFrameHeaderBytes + std::max(chunk_bytes, kLargestGranule);
}

size_t fullPayload(const Layout& layout, DType dtype, size_t chunk_bytes) {
  size_t bytes = 0;
  for (const Segment& segment : layout.segments())
    bytes += makeCodec(segment.codec)->encodedBytes(segment.count, dtype);
  return std::min(chunk_bytes, std::max(kMinChunkBytes, bytes / kFrames / kPartUnit * kPartUnit));
}

MessagePlan planMessage(const Layout& layout, DType dtype, size_t chunk_bytes) {
  MessagePlan plan{layout, dtype, {}};
  const size_t full = fullPayload(layout, dtype, chunk_bytes);
  const size_t most = frameCapacity(full) - kFrameHeaderBytes;
  Frame frame;
  auto close = [&](uint64_t next) {
    if (!frame.runs.empty()) plan.frames.push_back(std::move(frame));
    frame = Frame{};
    frame.first = next;
  };
  for (uint32_t number = 0; number < layout.segments().size(); ++number) {
    const Segment& segment = layout.segments()[number];
    std::shared_ptr<const Codec> codec = makeCodec(segment);
    if (!codec->supports(dtype)) {
      throw TypeError("codec " + segment.codec.str() + " takes float32, float16 and bfloat16 elements, got " +
                      dtypeName(dtype));
    }
    if (codec->granularity() == Codec::kUncut) {
      const size_t whole = codec->encodedBytes(segment.count, dtype);
      for (size_t part = 0; part < whole;) {
        const size_t bytes = partFitting(whole - part, full, frame.payload_bytes);
        if (bytes == 0) {
          close(segment.first);
          continue;
        }
        const Run run{codec, segment.first, 0, segment.count, bytes, number, part, whole};
        frame.runs.push_back(run);
        if (run.last()) frame.elements += segment.count;
        frame.payload_bytes += static_cast<uint32_t>(bytes);
        part += bytes;
      }
      continue;
    }
    for (uint64_t offset = 0; offset < segment.count;) {
      const uint64_t at = segment.first + offset;
      const uint64_t left = segment.count - offset;
      const size_t used = frame.payload_bytes;
      uint64_t count = used < full ? fitting(*codec, dtype, left, full - used) : 0;
      if (count == 0 && used == 0) count = fitting(*codec, dtype, left, most);
      if (count == 0) {
        close(at);
        continue;
      }
      const size_t bytes = codec->encodedBytes(count, dtype);
      frame.runs.push_back({codec, at, offset, count, bytes, number, 0, bytes});
      frame.elements += count;
      frame.payload_bytes += static_cast<uint32_t>(bytes);
      offset += count;
    }
  }
  close(layout.elements());
  return plan;
}

size_t MessagePlan::wholeWith(size_t frame) const {
  while (!frames[frame].runs.back().last())
    ++frame;
  return frame;
}

FrameHeader MessagePlan::header(const Frame& frame) const {
  FrameHeader header;
  const std::vector<Segment>& segments = layout.segments();
  if (segments.size() == 1) {
    const CodecSpec& codec = segments[0].codec;
    header.codec = codec.id;
    header.bits = codec.bits;
    header.bucket = codec.bucket;
    header.flags = frameFlags(codec);
  } else {
    header.codec = CodecId::layout;
    header.key_hash = layout.hash();
  }
  header.state_version = layout.stateVersion();
  header.dtype = dtype;
  header.elements = frame.elements;
  header.first = frame.first;
  header.payload_bytes = frame.payload_bytes;
  return header;
}

}  // namespace lowcomm
