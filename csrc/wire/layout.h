#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "codec/spec.h"

namespace lowcomm {

// A run of a flattened message with a codec of its own: one parameter's shard in a flat buffer. Bucket and block
// numbers count from the segment's first element.
struct Segment {
  uint64_t first = 0;
  uint64_t count = 0;
  CodecSpec codec;
  bool operator==(const Segment&) const = default;
};

// Several tensors in one message: segments that cover [0, elements) in order, without gap or overlap.
class Layout {
 public:
  // Throws ValueError naming the first segment that leaves a gap or overlaps, or whose codec cannot take it: one with
  // axis=channel needs its number of channels, and whole rows of them. Neighbouring `none` segments are merged,
  // empty segments dropped.
  explicit Layout(std::vector<Segment> segments);

  // One segment over the whole message: what an op without a layout carries.
  static Layout single(uint64_t elements, const CodecSpec& codec);

  const std::vector<Segment>& segments() const { return segments_; }
  uint64_t elements() const { return elements_; }

  // Whether any segment has a codec other than none.
  bool coded() const;

  // 64-bit hash of text(): the key hash of a layout's frames.
  uint64_t hash() const { return hash_; }

  // One line a segment, "first count codec": what ranks compare when a layout is registered.
  std::string text() const;
  static Layout parse(std::string_view text);

 private:
  std::vector<Segment> segments_;
  uint64_t elements_ = 0;
  uint64_t hash_ = 0;
};

}  // namespace lowcomm
