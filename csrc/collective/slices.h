#pragma once

#include <cstdint>
#include <vector>

#include "codec/spec.h"

namespace lowcomm {

// A rank's share of a tensor.
struct Slice {
  uint64_t first = 0;
  uint64_t count = 0;
  bool operator==(const Slice&) const = default;
};

// Cuts `elements` into a slice a rank, in order: all of the same length, a multiple of what the codec is cut at (of its
// bucket; of 512 elements, or of a row, where it cannot be cut) but for the last ones, which are shorter or empty.
// Each is encoded as a tensor of its own. ValueError where makeCodec throws it.
std::vector<Slice> slicesOf(uint64_t elements, const CodecSpec& codec, int ranks);

}  // namespace lowcomm
