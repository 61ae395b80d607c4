#include "collective/slices.h"

#include <algorithm>

#include "codec/codec.h"

namespace lowcomm {
namespace {

constexpr uint64_t kBlock = 512;

uint64_t unitOf(const CodecSpec& spec) {
  if (spec.axis == Axis::channel) return spec.bucket;  // rows
  const uint64_t granule = makeCodec(spec)->granularity();
  return granule == Codec::kUncut ? kBlock : granule;
}

}  // namespace

std::vector<Slice> slicesOf(uint64_t elements, const CodecSpec& codec, int ranks) {
  const uint64_t unit = unitOf(codec);
  const uint64_t units = (elements + unit - 1) / unit;
  const uint64_t length = (units + ranks - 1) / ranks * unit;
  std::vector<Slice> slices;
  for (int rank = 0; rank < ranks; ++rank) {
    const uint64_t first = std::min(elements, rank * length);
    slices.push_back({first, std::min(length, elements - first)});
  }
  return slices;
}

}  // namespace lowcomm
