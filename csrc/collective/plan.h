#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"
#include "wire/layout.h"

namespace lowcomm {

class CodedResidual;
struct FrameHeader;
struct MessageSummary;
struct NonFiniteError;

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

  // That error for other ways to encode the run: `error` counts in the segment.
  NonFiniteError inMessage(const NonFiniteError& error, const std::string& of) const;
};

// One frame of a message.
struct Frame {
  uint64_t first = 0;
  uint64_t elements = 0;
  uint32_t payload_bytes = 0;
  std::vector<Run> runs;  // their shares of the payload stand in it in this order
};

// A message cut into frames: the same on every rank that knows layout, dtype and chunk_bytes, before anything is sent.
struct MessagePlan {
  Layout layout;
  DType dtype;
  std::vector<Frame> frames;

  // Header fields that the plan decides: codec, bits, bucket, flags, dtype, key hash, elements, first, payload_bytes.
  FrameHeader header(const Frame& frame) const;

  // A frame with which all runs of frame `frame` are whole: that one, except for codecs that cannot be cut.
  size_t wholeWith(size_t frame) const;

  uint64_t rawBytes() const { return layout.elements() * itemBytes(dtype); }
};

inline constexpr size_t kMinChunkBytes = 64 << 10;
inline constexpr size_t kMaxChunkBytes = 1 << 20;

// Bytes that any frame of the group fits in, header included: a cut needs one granule even where a frame is smaller.
size_t frameCapacity(size_t chunk_bytes);

// Bytes that a frame with such a payload fits in, and an error frame in its place.
size_t roomFor(size_t payload_bytes);

// Frames that an encoded message is cut into at least, where that makes none smaller than kMinChunkBytes: before the
// first one is encoded and after the last one has come the link has nothing to do. An exact one is copied, which is
// a short pause, and each of its frames costs two processes a wake.
inline constexpr size_t kFrames = 32;

// Payload bytes of a full frame of a message with this layout: a group's `chunk_bytes`, or less where it is coded.
size_t fullPayload(const Layout& layout, DType dtype, size_t chunk_bytes);

// Cuts at multiples of each codec's granularity, filling frames up to fullPayload() bytes (FORMAT.md, "Filling
// frames").
// Throws TypeError when a codec of the layout does not take `dtype`.
MessagePlan planMessage(const Layout& layout, DType dtype, size_t chunk_bytes);

// Whether a message by this codec is cut into frames between elements; else bytes of its payload are. ValueError where
// makeCodec throws it.
bool canBeCut(const CodecSpec& spec);

// A rank's share of a tensor.
struct Slice {
  uint64_t first = 0;
  uint64_t count = 0;
  bool operator==(const Slice&) const = default;
};

// Cuts `elements` into a slice a rank, in order: all of the same length, a multiple of what the codec is cut at (of its
// bucket; of 512 elements, or of a row, where it cannot be cut) except for the last ones, which are shorter or empty.
// With weights, one a rank, their lengths are in proportion to these. Each is encoded as a tensor of its own.
// ValueError where makeCodec throws it.
std::vector<Slice> slicesOf(uint64_t elements, const CodecSpec& codec, int ranks,
                            const std::vector<uint64_t>& weights = {});

// How one tensor's parts, a rank each, are cut into frames: once where all parts are cut in the same way.
class RankPlans {
 public:
  // `layouts`: one for all ranks, or one a rank; ValueError for another number. Throws as planMessage.
  RankPlans(const std::vector<Layout>& layouts, DType dtype, size_t chunk_bytes, int ranks);

  const MessagePlan& of(int rank) const { return plans_[plans_.size() == 1 ? 0 : rank]; }

  // For each rank, the message that Phase::out and Phase::in hold.
  std::vector<const MessagePlan*> all() const;

  // Bytes of the parts of all ranks except `rank`, as elements: it would send them uncoded.
  uint64_t rawBytesToPeers(int rank) const;

  // Elements of a rank's part, or the parts' joined by "/" where they differ.
  MessageSummary described() const;

 private:
  int ranks_;
  std::vector<MessagePlan> plans_;
};

// Makes the elements [first, first + count) of a tensor, fp32, at `out`, for a tensor that is never held as a whole.
// Called more than once for the same elements.
using MakeElements = std::function<void(float* out, uint64_t first, uint64_t count)>;

// The elements of one segment of a slice that ranks reduce: part of a tensor.
struct ScatterEntry {
  uint64_t count = 0;  // elements, 1 or more
  const void* input = nullptr;
  void* output = nullptr;     // takes the reduction; may be the input; null: this rank does not get it as elements
  float* residual = nullptr;  // of error feedback for these elements; null: none
  uint64_t slot = 0;          // of the message's draws

  uint64_t first = 0;                    // of the entry in its tensor, by which the next two count
  const MakeElements* make = nullptr;    // in place of the input
  const CodedResidual* coded = nullptr;  // in place of the residual
  uint32_t tensor = 0;                   // its number in the message

  bool feedback() const { return residual || coded; }
};

// For each rank, the entries that make up its slice, in the order of the slice's segments.
using ScatterEntries = std::vector<std::vector<ScatterEntry>>;

// Payloads that travel in several frames because their codec cannot be cut: encoded as a whole with the first part, and
// decoded as a whole with the last. A payload in one frame is never copied.

// The sender's side: for every peer the payload under way.
class OutgoingParts {
 public:
  // Writes the run's part of its payload for `peer` to `to`. `encode(span)` makes the whole payload.
  template <class F>
  void write(std::span<std::byte> to, const Run& run, int peer, F&& encode) {
    if (run.bytes == run.whole) return encode(to);
    std::vector<std::byte>& payload = payloads_[peer];
    if (run.part == 0) {
      payload.resize(run.whole);
      encode(std::span(payload));
    }
    std::memcpy(to.data(), payload.data() + run.part, run.bytes);
    if (run.last()) payloads_.erase(peer);
  }

 private:
  std::map<int, std::vector<std::byte>> payloads_;
};

// The receiver's side: for every rank what has come.
class IncomingParts {
 public:
  // Takes the run's part from `rank`; with the last one the whole payload, which stays until that rank's next part,
  // else nothing.
  std::span<const std::byte> take(const Run& run, int rank, std::span<const std::byte> part) {
    if (run.bytes == run.whole) return part;
    std::vector<std::byte>& payload = payloads_[rank];
    payload.resize(run.whole);
    std::memcpy(payload.data() + run.part, part.data(), run.bytes);
    return run.last() ? payload : std::span<const std::byte>();
  }

 private:
  std::map<int, std::vector<std::byte>> payloads_;
};

}  // namespace lowcomm
