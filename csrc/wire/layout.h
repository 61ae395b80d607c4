#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "codec/codec.h"
#include "codec/level_table.h"
#include "codec/spec.h"

namespace lowcomm {

// A run of a flattened message with a codec of its own: one parameter's shard in a flat buffer. Bucket and block
// numbers count from the segment's first element.
struct Segment {
  uint64_t first = 0;
  uint64_t count = 0;
  CodecSpec codec;
  std::optional<LevelTable> table = std::nullopt;  // the levels of a codec that needsTable
  bool operator==(const Segment&) const = default;
};

// The segment's codec, with its table where it has one.
std::shared_ptr<const Codec> makeCodec(const Segment& segment);

// Several tensors in one message: segments that cover [0, elements) in order, without gap or overlap.
class Layout {
 public:
  // Throws ValueError naming the first segment that leaves a gap or overlaps, or whose codec cannot take it: one with
  // axis=channel needs its number of channels, and whole rows of them; a table must be its codec's. Neighbouring `none`
  // segments are merged, empty segments dropped.
  explicit Layout(std::vector<Segment> segments);

  // One segment over the whole message: what an op without a layout carries.
  static Layout single(uint64_t elements, const CodecSpec& codec);

  const std::vector<Segment>& segments() const { return segments_; }
  uint64_t elements() const { return elements_; }

  // Whether any segment has a codec other than none.
  bool coded() const;

  // 64-bit hash of text(): the key hash of a layout's frames.
  uint64_t hash() const { return hash_; }

  // The highest version of its tables, 0 without any: state_version of its frames.
  uint32_t stateVersion() const;

  // One line a segment, "first count codec", then its table if any: what ranks compare when a layout is registered.
  std::string text() const;
  static Layout parse(std::string_view text);

 private:
  std::vector<Segment> segments_;
  uint64_t elements_ = 0;
  uint64_t hash_ = 0;
};

}  // namespace lowcomm
