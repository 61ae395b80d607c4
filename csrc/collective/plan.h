#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "codec/codec.h"
#include "wire/frame.h"
#include "wire/layout.h"

namespace lowcomm {

// Elements of one segment that travel in one frame, encoded independently of the rest.
struct Run {
  std::shared_ptr<const Codec> codec;
  uint64_t at = 0;      // first element, counted in the message
  uint64_t offset = 0;  // the same element, counted in its segment: what bucket, block and draws are numbered by
  uint64_t count = 0;
  size_t bytes = 0;      // its share of the frame's payload
  uint32_t segment = 0;  // its segment's number: added to the message's slot, so that no two segments share a draw

  // A codec that cannot be cut: the run is the whole segment in each of its frames, and `bytes` are those from `part`
  // on of its payload of `whole` bytes. Else part is 0 and whole == bytes.
  size_t part = 0;
  size_t whole = 0;

  // Whether the payload is all there with this part: it is then decoded, and its elements count in this frame.
  bool last() const { return part + bytes == whole; }

  // codec->encode of this run's whole payload; its first element is at `src`. A NonFiniteError counts in the message,
  // not in the segment, and ends with `of`.
  void encode(std::span<std::byte> payload, const void* src, DType dtype, const Draws& draws,
              const std::string& of = "") const;

  // What `encode` does about a NonFiniteError, for other ways to encode the run.
  template <class F>
  void countInMessage(const std::string& of, F&& encode) const {
    try {
      encode();
    } catch (const NonFiniteError& error) {
      throw NonFiniteError(error.codec, error.value, error.position - offset + at, error.limit, of);
    }
  }
};

// One frame of a message.
struct Frame {
  uint64_t first = 0;
  uint64_t elements = 0;
  uint32_t payload_bytes = 0;
  std::vector<Run> runs;

  // Calls f(run, its share of the payload) for every run; `payload` is a span of payload_bytes.
  template <class Bytes, class F>
  void eachRun(std::span<Bytes> payload, F&& f) const {
    size_t at = 0;
    for (const Run& run : runs) {
      f(run, payload.subspan(at, run.bytes));
      at += run.bytes;
    }
  }
};

// A message cut into frames: the same on every rank that knows layout, dtype and chunk_bytes, before anything is sent.
struct MessagePlan {
  Layout layout;
  DType dtype;
  std::vector<Frame> frames;

  // Header fields that the plan decides: codec, bits, bucket, flags, dtype, key hash, elements, first, payload_bytes.
  FrameHeader header(const Frame& frame) const;

  // A frame with which all runs of frame `frame` are whole: that one, but for codecs that cannot be cut.
  size_t wholeWith(size_t frame) const;

  uint64_t rawBytes() const { return layout.elements() * itemBytes(dtype); }
};

inline constexpr size_t kMinChunkBytes = 64 << 10;
inline constexpr size_t kMaxChunkBytes = 1 << 20;

// Bytes that any frame of the group fits in, header included: a cut needs one granule even where a frame is smaller.
size_t frameCapacity(size_t chunk_bytes);

// Frames that a message is cut into at least, where that makes none smaller than kMinChunkBytes: before the first one
// is encoded and after the last one has come the link has nothing to do.
inline constexpr size_t kFrames = 32;

// Payload bytes of a full frame of such a message, a group's `chunk_bytes` or less.
size_t fullPayload(const Layout& layout, DType dtype, size_t chunk_bytes);

// Cuts at multiples of each codec's granularity, filling frames up to fullPayload() bytes (FORMAT.md, "Filling
// frames").
// Throws TypeError when a codec of the layout does not take `dtype`.
MessagePlan planMessage(const Layout& layout, DType dtype, size_t chunk_bytes);

}  // namespace lowcomm
