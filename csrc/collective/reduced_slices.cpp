#include "collective/reduced_slices.h"

#include <cstring>
#include <utility>

namespace lowcomm {
namespace {

std::vector<Layout> layoutsOf(const std::vector<Slice>& slices, const CodecSpec& codec) {
  std::vector<Layout> layouts;
  for (const Slice& slice : slices)
    layouts.push_back(Layout::single(slice.count, codec));
  return layouts;
}

std::vector<Layout> layoutsOf(const SegmentPlaces& places, const CodecSpec& codec) {
  std::vector<Layout> layouts;
  for (const auto& slice : places) {
    std::vector<Segment> segments;
    uint64_t first = 0;
    for (const ScatterEntry& place : slice) {
      segments.push_back({first, place.count, codec});
      first += place.count;
    }
    layouts.emplace_back(std::move(segments));
  }
  return layouts;
}

}  // namespace

ReducedSlices::ReducedSlices(const OpContext& op, const AllReduceMessage& message)
    : rank_(op.group.rank()),
      ranks_(op.group.size()),
      message_(message),
      slices_(message.places.empty() ? slicesOf(message.elements, message.codec, ranks_) : std::vector<Slice>()),
      plans_(message.places.empty() ? layoutsOf(slices_, message.codec) : layoutsOf(message.places, message.codec),
             message.dtype, op.group.chunk_bytes, ranks_) {
  size_t bytes = 0;
  for (const Frame& frame : own().frames) {
    starts_.push_back(bytes);
    bytes += frame.payload_bytes;
  }
  codes_.resize(bytes);
}

MessageSummary ReducedSlices::described() const {
  MessageSummary described = plans_.described();
  described.elements = std::to_string(message_.elements);
  return described;
}

uint64_t ReducedSlices::rawBytes() const {
  const uint64_t own_bytes = own().rawBytes();
  return plans_.rawBytesToPeers(rank_) + (ranks_ - 1) * own_bytes;
}

std::byte* ReducedSlices::elements(int rank) const {
  return static_cast<std::byte*>(message_.data) + slices_[rank].first * itemBytes(message_.dtype);
}

std::byte* ReducedSlices::elements(int rank, const Run& run) const {
  if (!message_.places.empty()) {
    return static_cast<std::byte*>(message_.places[rank][run.segment].data) + run.offset * itemBytes(message_.dtype);
  }
  return elements(rank) + run.at * itemBytes(message_.dtype);
}

std::vector<const void*> ReducedSlices::inputs() const {
  std::vector<const void*> inputs;
  for (int rank = 0; message_.places.empty() && rank < ranks_; ++rank)
    inputs.push_back(elements(rank));
  return inputs;
}

std::span<std::byte> ReducedSlices::codes(size_t k, const Run& run) {
  size_t at = starts_[k];
  for (const Run& before : own().frames[k].runs) {
    if (&before == &run) break;
    at += before.bytes;
  }
  return std::span(codes_).subspan(at - run.part, run.whole);
}

void ReducedSlices::copyCodes(size_t k, std::span<std::byte> payload) const {
  std::memcpy(payload.data(), codes_.data() + starts_[k], payload.size());
}

}  // namespace lowcomm
