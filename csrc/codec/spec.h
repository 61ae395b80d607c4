#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lowcomm {

// Codec numbers as they stand in byte 6 of a frame header (wire/FORMAT.md). The numbers are the format: never reuse
// one.
enum class CodecId : uint8_t {
  none = 0,      // the elements themselves
  minmax = 1,    // grid between a bucket's minimum and maximum, nearest rounding
  qsgd = 2,      // the same grid, stochastic rounding
  layout = 255,  // several segments with a codec each (wire/layout.h); never written by a user
};

constexpr bool isGrid(CodecId id) {
  return id == CodecId::minmax || id == CodecId::qsgd;
}

// What bits and bucket of a grid codec may be, wherever they come from: a user, a caller, a peer's frame.
inline constexpr const char* kGridBits = "1...8";
constexpr bool isGridBits(uint8_t bits) {
  return bits >= 1 && bits <= 8;
}
inline constexpr const char* kGridBuckets = "a power of two in 64...65536";
constexpr bool isGridBucket(uint32_t bucket) {
  return std::has_single_bit(bucket) && bucket >= 64 && bucket <= 65536;
}

// A codec with its options, as users write it: `name<bits>:key=value,...`, for example "minmax8:bucket=1024".
struct CodecSpec {
  CodecId id = CodecId::none;
  uint8_t bits = 0;     // isGridBits for grid codecs, 0 for none
  uint32_t bucket = 0;  // elements sharing one scale: isGridBucket for grid codecs, 0 for none

  // Parses a user's text. Throws ValueError that names the offending part and what was expected: an unknown codec, bits
  // outside 1...8, an unknown option or value, a bucket that is no power of two in 64...65,536. Options and codecs of
  // the published family that this version does not have are refused as such, by name.
  static CodecSpec parse(std::string_view text);

  // Canonical text: parse(str()) == *this, and equal specs have equal text.
  std::string str() const;

  bool operator==(const CodecSpec&) const = default;
};

// A sentence for whoever chose this codec where it is allowed but hardly ever what was meant: a coarse grid over a
// large bucket (1 or 2 bits, 512 elements and more) has an error about as large as the values. None for other codecs.
std::optional<std::string> caution(const CodecSpec& spec);

}  // namespace lowcomm
