#pragma once

#include <charconv>
#include <string>

#include "codec/family.h"

namespace lowcomm {

// What the numbers among a codec's options may be, for those who parse a text (spec_parse.cpp) and those who check what
// was made without one (spec_check.cpp); and how they are written.

// A grid of any bits with such a step stays within what fp32 can add up, and its inverse is not infinite.
inline constexpr const char* kDeltas = "a step of 1e-30...1e30";
inline bool isDelta(float delta) {
  return delta >= 1e-30f && delta <= 1e30f;
}

inline constexpr const char* kKeeps = "a share above 0 and at most 1";
inline bool isKeep(double keep) {
  return keep > 0 && keep <= 1;
}

inline constexpr const char* kGains = "a factor of 0.001...1000";
inline bool isGain(float gain) {
  return gain >= 1e-3f && gain <= 1e3f;
}

// Values of topk are one tensor of their own: on plain grids alone, for a rotation or a table serves a whole tensor.
inline bool isValueFamily(const GridFamily* family) {
  return family != nullptr && !family->book;
}

// The fewest digits that parse to the same number: one number has one text.
template <typename Number>
std::string shortest(Number value) {
  char digits[32];
  const auto written = std::to_chars(digits, digits + sizeof(digits), value);
  return {digits, written.ptr};
}

}  // namespace lowcomm
