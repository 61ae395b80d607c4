#pragma once

#include <cstdint>
#include <string_view>

namespace lowcomm {

// Codec numbers as they stand in byte 6 of a frame header (wire/FORMAT.md). The numbers are the format: never reuse
// one.
enum class CodecId : uint8_t {
  none = 0,      // the elements themselves
  minmax = 1,    // grid between a bucket's minimum and maximum, nearest rounding
  qsgd = 2,      // the same grid, stochastic rounding
  dither = 3,    // the same grid, rounded up or down by one random number a bucket
  lattice = 4,   // dither's codes on a grid that is itself shifted by that number
  layout = 255,  // several segments with a codec each (wire/layout.h); never written by a user
};

// Bits 0-1 of a frame's flags: how elements are rounded.
enum class Rounding : uint8_t { nearest = 0, stochastic = 1, dithered = 2 };

// What sets one grid codec apart from another: the only list of them. Parser, names, frame checks and kernels' forms
// follow it.
struct GridFamily {
  CodecId id;
  std::string_view name;  // without the bits
  uint8_t least_bits, most_bits;
  Rounding rounding;
  bool delta;  // takes the option delta
};

inline constexpr GridFamily kGridFamilies[] = {
    {CodecId::minmax, "minmax", 1, 8, Rounding::nearest, false},
    {CodecId::qsgd, "qsgd", 1, 8, Rounding::stochastic, true},
    {CodecId::dither, "dither", 1, 8, Rounding::dithered, false},
    {CodecId::lattice, "lattice", 1, 8, Rounding::dithered, true},
};
inline constexpr CodecId kLastGridId = CodecId::lattice;  // ids 1...this one are grid codecs

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

}  // namespace lowcomm
