#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "codec/family.h"

namespace lowcomm {

// Bits and buckets that a grid codec may have, whether a user, a caller or a peer's frame gives them.
constexpr bool isGridBits(const GridFamily& family, uint8_t bits) {
  return bits >= family.least_bits && bits <= family.most_bits;
}
std::string gridBits(const GridFamily& family);  // "1...8"

// Whether byte 8 of a frame may be this. frameFlags of a spec always is one of them.
constexpr bool isGridFlags(const GridFamily& family, uint8_t flags) {
  const uint8_t optional = (family.l2 ? kL2Flag : 0) | (family.bf16() ? kBf16Flag : 0) |
                           (family.channels() ? kChannelFlag | kUnitFlag
                            : family.centred  ? kUnitFlag
                                              : 0) |
                           (family.rotation == Rotation::option ? kRotatedFlag : 0);
  const uint8_t always =
      static_cast<uint8_t>(family.rounding) | (family.rotation == Rotation::always ? kRotatedFlag : 0);
  return (flags & ~optional) == always && ((flags & kChannelFlag) == 0 || (flags & (kRotatedFlag | kUnitFlag)) == 0);
}
constexpr const char* gridBuckets(bool rotated) {
  return rotated ? "a power of two in 512...65536" : "a power of two in 64...65536";
}
constexpr bool isGridBucket(uint32_t bucket, bool rotated = false) {
  return std::has_single_bit(bucket) && bucket >= (rotated ? kLeastRotatedBucket : 64) && bucket <= 65536;
}
inline constexpr uint32_t kTensorBucket = 0;  // bucket=tensor: one for a whole tensor, in place of a size
inline constexpr uint64_t kLongestTensor = uint64_t{1} << 31;  // elements that such a bucket may have
// Channels of axis=channel, which stand where a bucket does.
inline constexpr const char* kGridChannels = "1...65536";
constexpr bool isGridChannels(uint32_t channels) {
  return channels >= 1 && channels <= 65536;
}

// Numbers that a codec's options may have: the parser and misfit() use these functions.

inline constexpr const char* kKeeps =
    "a share above 0 and at most 1, or with chunk a power of two from 8 to half the chunk";
inline bool isKeep(double keep, uint32_t chunk) {
  if (chunk == 0) return keep > 0 && keep <= 1;
  return keep >= 8 && keep <= chunk / 2 && std::has_single_bit(static_cast<uint32_t>(keep)) &&
         keep == static_cast<uint32_t>(keep);
}

inline constexpr const char* kGains = "a factor of 0.001...1000";
inline bool isGain(float gain) {
  return gain >= 1e-3f && gain <= 1e3f;
}

inline constexpr uint32_t kChunkBucket = 128;  // values of chunks that share a scale

// Values of topk are one tensor of their own: on plain grids alone, for a rotation or a table serves a whole tensor.
inline bool isValueFamily(const GridFamily* family) {
  return family != nullptr && !family->book;
}

// Elements of a unit, which the option unit=<U> gives (FORMAT.md, "Units").
inline constexpr const char* kUnits = "1...2^40";
constexpr bool isUnit(uint64_t unit) {
  return unit >= 1 && unit <= uint64_t{1} << 40;
}

// The two ways to treat NaN, infinities and magnitudes of 2^126 and more: refuse the data, or send a bucket that
// decodes to NaN. FORMAT.md, "What every grid codec refuses".
enum class Nonfinite : uint8_t { error, poison };

// A codec with its options, as users write it: `name<bits>:key=value,...`, for example "minmax8:bucket=1024".
struct CodecSpec {
  CodecId id = CodecId::none;
  uint8_t bits = 0;  // isGridBits for grid codecs, 0 for none
  // Elements sharing one scale: isGridBucket for grid codecs, 0 for others. With axis=channel the number of channels C,
  // or 0 where that is still to be taken from a tensor's last dimension (withChannels). Of topk the chunk, isGridBucket
  // too, or 0 for the whole tensor.
  uint32_t bucket = 0;
  Range range = Range::absmax;
  Meta meta = Meta::fp32;
  Nonfinite nonfinite = Nonfinite::error;
  Axis axis = Axis::flat;
  bool rotate = false;             // the option; gauss is rotated without it (isRotated)
  float gain = 1;                  // gauss: decoded values are multiplied by it
  double keep = 0;                 // topk: the share of elements that is sent, or how many of each chunk (isKeep)
  CodecId values = CodecId::none;  // topk: the grid codec of what is sent, with the options of valueSpec()
  uint8_t value_bits = 0;          // its bits
  // Consecutive elements that are coded without regard to others, so that none tells of those behind it: a token's, a
  // sample's. 0: buckets and rotations go on from one to the next. Never a multiple of the bucket, where that makes no
  // difference.
  uint64_t unit = 0;

  // Parses a user's text. Throws ValueError that names the offending part and what was expected: an unknown codec, bits
  // outside the codec's, an unknown option or value, a bucket that is no power of two in 64...65,536, an option that is
  // another codec's. Options and codecs of the published family that this version does not have are refused as such, by
  // name.
  static CodecSpec parse(std::string_view text);

  // Canonical text: parse(str()) == *this, and equal specs have equal text.
  std::string str() const;

  // Whether the number of channels is still open: such a spec is a user's wish, and no codec can be made of it.
  bool open() const { return axis == Axis::channel && bucket == 0; }

  // This spec for a tensor with that last dimension: itself unless it is open. Throws ValueError for a size that cannot
  // be a number of channels, or for another than the spec names.
  CodecSpec withChannels(uint64_t channels) const;

  // This spec for tensors whose units have `elements`: itself where buckets and rotations end with them anyway. Throws
  // ValueError where the codec ties all elements of a tensor together, or has another unit.
  CodecSpec withUnit(uint64_t elements) const;

  bool operator==(const CodecSpec&) const = default;
};

// topk: what its values are encoded with. They are one tensor, in the order of the elements.
CodecSpec valueSpec(const CodecSpec& topk);

bool isRotated(const CodecSpec& spec);

// The option that makes each of a codec's values depend on all elements of a tensor, such as "axis=channel", or on all
// of a chunk, whatever units they are in; null if the codec has none.
const char* tiesAll(const CodecSpec& spec);

// Whether the codec is nothing without a level table (codec/level_table.h), which a text cannot name.
bool needsTable(const CodecSpec& spec);

// The least magnitude that the codec refuses: kFiniteLimit or kRotatedLimit (kernels/finite.h), infinity for a cast.
float finiteLimit(const CodecSpec& spec);

// Byte 8 of a frame of this codec.
uint8_t frameFlags(const CodecSpec& spec);

// The options of a codec that do not fit it or each other; none when it may be made. `parse` never returns such a spec.
std::optional<std::string> misfit(const CodecSpec& spec);

// A warning for a codec that is allowed but hardly ever meant: a coarse grid over a large bucket (1 or 2 bits, 512
// elements and more) has an error of half the values or more. Empty for other codecs.
std::optional<std::string> caution(const CodecSpec& spec);

}  // namespace lowcomm
