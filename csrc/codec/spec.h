#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "codec/family.h"

namespace lowcomm {

// What bits and bucket of a grid codec may be, wherever they come from: a user, a caller, a peer's frame.
constexpr bool isGridBits(const GridFamily& family, uint8_t bits) {
  return bits >= family.least_bits && bits <= family.most_bits;
}
std::string gridBits(const GridFamily& family);  // "1...8"

// Whether byte 8 of a frame may be this. frameFlags of a spec always is one of them.
constexpr bool isGridFlags(const GridFamily& family, uint8_t flags) {
  const uint8_t optional = (family.l2 ? kL2Flag : 0) | (family.bf16() ? kBf16Flag : 0) |
                           (family.rotation == Rotation::option ? kRotatedFlag : 0);
  const uint8_t always =
      static_cast<uint8_t>(family.rounding) | (family.rotation == Rotation::always ? kRotatedFlag : 0);
  return (flags & ~optional) == always;
}
inline constexpr const char* kGridBuckets = "a power of two in 64...65536";
constexpr const char* gridBuckets(bool rotated) {
  return rotated ? "a power of two in 512...65536" : kGridBuckets;
}
constexpr bool isGridBucket(uint32_t bucket, bool rotated = false) {
  return std::has_single_bit(bucket) && bucket >= (rotated ? kLeastRotatedBucket : 64) && bucket <= 65536;
}

// What an encoder does with NaN, infinities and magnitudes of 2^126 and more: refuse its data, put what it can send in
// their place, or send a bucket that decodes to NaN. FORMAT.md, "What every grid codec refuses".
enum class Nonfinite : uint8_t { error = 0, saturate = 1, poison = 2 };

// A codec with its options, as users write it: `name<bits>:key=value,...`, for example "minmax8:bucket=1024".
struct CodecSpec {
  CodecId id = CodecId::none;
  uint8_t bits = 0;     // isGridBits for grid codecs, 0 for none
  uint32_t bucket = 0;  // elements sharing one scale: isGridBucket for grid codecs, 0 for none
  float delta = 0;      // the grid's step, in the elements' unit, where it is not 0; else it follows a bucket's range
  Range range = Range::absmax;
  Meta meta = Meta::fp32;
  Nonfinite nonfinite = Nonfinite::error;
  bool rotate = false;  // the option; gauss is rotated without it (isRotated)
  float gain = 1;       // gauss: decoded values are multiplied by it

  // Parses a user's text. Throws ValueError that names the offending part and what was expected: an unknown codec, bits
  // outside the codec's, an unknown option or value, a bucket that is no power of two in 64...65,536, an option that is
  // another codec's. Options and codecs of the published family that this version does not have are refused as such, by
  // name.
  static CodecSpec parse(std::string_view text);

  // Canonical text: parse(str()) == *this, and equal specs have equal text.
  std::string str() const;

  bool operator==(const CodecSpec&) const = default;
};

bool isRotated(const CodecSpec& spec);

// Whether the codec is nothing without a level table (codec/level_table.h), which a text cannot name.
bool needsTable(const CodecSpec& spec);

// The least magnitude that the codec refuses: kFiniteLimit or kRotatedLimit (kernels/finite.h).
float finiteLimit(const CodecSpec& spec);

// Byte 8 of a frame of this codec.
uint8_t frameFlags(const CodecSpec& spec);

// The options of a codec that do not fit it or each other; none when it may be made. `parse` never returns such a spec.
std::optional<std::string> misfit(const CodecSpec& spec);

// A sentence for whoever chose this codec where it is allowed but hardly ever what was meant: a coarse grid over a
// large bucket (1 or 2 bits, 512 elements and more) has an error about as large as the values. None for other codecs.
std::optional<std::string> caution(const CodecSpec& spec);

}  // namespace lowcomm
