#pragma once

#include <cstdint>
#include <string_view>

namespace lowcomm {

// Codec numbers as they stand in byte 6 of a frame header (wire/FORMAT.md). The numbers are the format: never reuse
// one. 3, 8 and 13 belonged to codecs that were deleted.
enum class CodecId : uint8_t {
  none = 0,     // the elements themselves
  minmax = 1,   // grid between a bucket's minimum and maximum, nearest rounding
  qsgd = 2,     // the same grid, stochastic rounding
  lattice = 4,  // nearest rounding on that grid, shifted by one random number a bucket
  sym = 5,      // grid around 0 with a level at 0, after the largest magnitude
  mid = 6,      // grid around 0 with levels half a step from 0
  sign1 = 7,    // the sign, and a bucket's mean magnitude
  levels = 9,   // between a bucket's minimum and maximum, on the levels of a table that travels apart
  gauss = 10,   // rotated, on the levels that suit a normal distribution best, times the root mean square
  fp16 = 11,    // casts: every element by itself in a narrower type
  bf16 = 12,
  topk = 14,     // the largest magnitudes with their places, in a grid codec
  logbyte = 15,  // scalars: sign and logarithm, 8 bits
  log9 = 16,     // the same, 9 bits
  layout = 255,  // several segments with a codec each (wire/layout.h); never written by a user
};

// Bits 0-1 of a frame's flags: how elements are rounded.
enum class Rounding : uint8_t { nearest = 0, stochastic = 1, dithered = 2 };

// Type of the numbers that a bucket sends next to its codes.
enum class Meta : uint8_t { fp32 = 0, bf16 = 1 };
inline constexpr uint8_t kBf16Flag = 1 << 2;  // of a frame

// The range that a grid around 0 follows: a bucket's largest magnitude, or twice its root mean square, beyond which
// values are cut off.
enum class Range : uint8_t { absmax = 0, l2 = 1 };
inline constexpr uint8_t kL2Flag = 1 << 3;  // of a frame

// Which elements share a scale: consecutive ones, or those with the same index in a tensor's last dimension.
enum class Axis : uint8_t { flat = 0, channel = 1 };
inline constexpr uint8_t kChannelFlag = 1 << 4;  // of a frame

// Whether a codec's elements are rotated before all else (kernels/codebook/codebook.h).
enum class Rotation : uint8_t { never, option, always };
inline constexpr uint8_t kRotatedFlag = 1 << 5;  // of a frame
inline constexpr uint32_t kLeastRotatedBucket = 512;

inline constexpr uint8_t kUnitFlag = 1 << 6;  // of a frame: buckets and rotations begin anew at every unit

// The properties in which grid codecs differ: the only list of them. Parser, names, frame checks and kernels' forms
// follow it.
struct GridFamily {
  CodecId id;
  std::string_view name;  // without the bits
  uint8_t least_bits, most_bits;
  Rounding rounding;
  bool centred;  // a grid around 0: a step is sent, no base
  bool l2;       // takes the option range=l2
  Rotation rotation = Rotation::option;
  bool book = false;  // levels from a codebook (kernels/codebook/codebook.h), not evenly spaced
  uint32_t default_bucket = 1024;
  Meta default_meta = Meta::fp32;

  // Whether metadata may be bfloat16. lattice's shift of the base would be lost in the rounding.
  constexpr bool bf16() const { return id != CodecId::lattice; }

  // Whether it takes the option axis=channel.
  constexpr bool channels() const { return !book; }
};

inline constexpr GridFamily kGridFamilies[] = {
    {CodecId::minmax, "minmax", 1, 8, Rounding::nearest, false, false},
    {CodecId::qsgd, "qsgd", 1, 8, Rounding::stochastic, false, false},
    {CodecId::lattice, "lattice", 1, 8, Rounding::dithered, false, false},
    {CodecId::sym, "sym", 2, 8, Rounding::nearest, true, true},
    {CodecId::mid, "mid", 1, 8, Rounding::nearest, true, true},
    {CodecId::sign1, "sign", 1, 1, Rounding::nearest, true, false},
    {CodecId::levels, "levels", 1, 8, Rounding::nearest, false, false, Rotation::never, true},
    {CodecId::gauss, "gauss", 1, 8, Rounding::nearest, true, false, Rotation::always, true, 512, Meta::bf16},
};

// Null for a number that is no grid codec's.
constexpr const GridFamily* gridFamily(CodecId id) {
  for (const GridFamily& family : kGridFamilies) {
    if (family.id == id) return &family;
  }
  return nullptr;
}

constexpr const GridFamily* gridFamily(std::string_view name) {
  for (const GridFamily& family : kGridFamilies) {
    if (family.name == name) return &family;
  }
  return nullptr;
}

constexpr bool isGrid(CodecId id) {
  return gridFamily(id) != nullptr;
}

// The codecs that are no grid: their bits are in the name, where there is anything to choose.
struct PlainFamily {
  CodecId id;
  std::string_view name;
  bool nonfinite;  // takes the option nonfinite; else every element has a code
};

inline constexpr PlainFamily kPlainFamilies[] = {
    {CodecId::fp16, "fp16", true},        {CodecId::bf16, "bf16", true},  {CodecId::topk, "topk", true},
    {CodecId::logbyte, "logbyte", false}, {CodecId::log9, "log9", false},
};

// Returns null for a number outside of these families.
constexpr const PlainFamily* plainFamily(CodecId id) {
  for (const PlainFamily& family : kPlainFamilies) {
    if (family.id == id) return &family;
  }
  return nullptr;
}

constexpr const PlainFamily* plainFamily(std::string_view name) {
  for (const PlainFamily& family : kPlainFamilies) {
    if (family.name == name) return &family;
  }
  return nullptr;
}

constexpr bool isCast(CodecId id) {
  return id == CodecId::fp16 || id == CodecId::bf16;
}

}  // namespace lowcomm
