#include "collective/plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "collective/message_summary.h"
#include "collective/op_context.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

// The largest granule of any codec: a bucket of 65,536 elements at 8 bits with its metadata, or 512 elements of 8
// bytes.
constexpr size_t kLargestGranule = 65536 + 64;
constexpr size_t kPartUnit = 64;  // payloads are multiples of it, so that all parts are

// a·b / c, rounded up; a·b may be more than 64 bits hold.
uint64_t timesOver(uint64_t a, uint64_t b, uint64_t c) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>((Wide{a} * b + c - 1) / c);
}

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

constexpr uint64_t kBlock = 512;

uint64_t unitOf(const CodecSpec& spec) {
  if (spec.axis == Axis::channel) return spec.bucket;  // rows
  const uint64_t granule = makeCodec(spec)->granularity();
  return granule == Codec::kUncut ? kBlock : granule;
}

}  // namespace

void Run::encode(std::span<std::byte> payload, const void* src, DType dtype, const Draws& draws,
                 const std::string& of) const {
  try {
    codec->encode(payload, src, dtype, offset, count, draws);
  } catch (const NonFiniteError& error) {
    throw inMessage(error, of);
  }
}

NonFiniteError Run::inMessage(const NonFiniteError& error, const std::string& of) const {
  return {error.codec, error.value, error.position - offset + at, error.limit, of};
}

size_t frameCapacity(size_t chunk_bytes) {
  return kFrameHeaderBytes + std::max(chunk_bytes, kLargestGranule);
}

size_t roomFor(size_t payload_bytes) {
  return kFrameHeaderBytes + std::max(payload_bytes, kMaxErrorText);
}

bool canBeCut(const CodecSpec& spec) {
  return makeCodec(spec)->granularity() != Codec::kUncut;
}

size_t fullPayload(const Layout& layout, DType dtype, size_t chunk_bytes) {
  if (!layout.coded()) return chunk_bytes;
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

std::vector<Slice> slicesOf(uint64_t elements, const CodecSpec& codec, int ranks,
                            const std::vector<uint64_t>& weights) {
  const uint64_t unit = unitOf(codec);
  const uint64_t units = (elements + unit - 1) / unit;
  const uint64_t all = std::accumulate(weights.begin(), weights.end(), uint64_t{0});
  std::vector<Slice> slices;
  uint64_t first = 0, weight = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    weight += weights.empty() ? 0 : weights[rank];
    const uint64_t behind = weights.empty() ? (units + ranks - 1) / ranks * (rank + 1) : timesOver(units, weight, all);
    const uint64_t end = std::min(elements, behind * unit);
    slices.push_back({first, end - first});
    first = end;
  }
  return slices;
}

RankPlans::RankPlans(const std::vector<Layout>& layouts, DType dtype, size_t chunk_bytes, int ranks) : ranks_(ranks) {
  if (layouts.size() != 1 && layouts.size() != static_cast<size_t>(ranks)) {
    throw ValueError("layouts of the ranks' parts: expected 1 or " + std::to_string(ranks) + ", got " +
                     std::to_string(layouts.size()));
  }
  const auto same = [&](const Layout& layout) { return layout.segments() == layouts.front().segments(); };
  const bool equal = std::all_of(layouts.begin(), layouts.end(), same);
  for (const Layout& layout : layouts) {
    if (plans_.empty() || !equal) plans_.push_back(planMessage(layout, dtype, chunk_bytes));
  }
}

std::vector<const MessagePlan*> RankPlans::all() const {
  std::vector<const MessagePlan*> plans;
  for (int rank = 0; rank < ranks_; ++rank)
    plans.push_back(&of(rank));
  return plans;
}

uint64_t RankPlans::rawBytesToPeers(int rank) const {
  uint64_t bytes = 0;
  for (int peer = 0; peer < ranks_; ++peer)
    bytes += peer == rank ? 0 : of(peer).rawBytes();
  return bytes;
}

MessageSummary RankPlans::described() const {
  MessageSummary described(plans_.front());
  for (size_t rank = 1; rank < plans_.size(); ++rank) {
    const MessageSummary other(plans_[rank]);
    described.elements += "/" + other.elements;
    if (described.codec == "none") described.codec = other.codec;  // of parts without elements
  }
  return described;
}

}  // namespace lowcomm
