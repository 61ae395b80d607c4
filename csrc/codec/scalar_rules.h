#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "base/narrow_float.h"

namespace lowcomm {

// The numbers of the scalar codecs (FORMAT.md, "Scalars: logbyte, log9"). The compiler makes them of IEEE's sums and
// quotients, so that no libm decides a byte. scalar_test.cpp derives them again.

// exp(x) for |x| up to 8, some units in the last place of a double off: no number below is that close to a tie.
constexpr double exponential(double x) {
  if (x < 0) return 1 / exponential(-x);
  double sum = 1, term = 1;
  for (int n = 1; n <= 50; ++n)
    sum += term *= x / n;
  return sum;
}

// The least float32 of x and more.
constexpr float leastFrom(double x) {
  const auto nearest = static_cast<float>(x);
  return nearest < x ? std::bit_cast<float>(std::bit_cast<uint32_t>(nearest) + 1) : nearest;
}

// The nearest float32 of exp((i - middle) / scale), for i = 1, 2 ...
template <size_t kCount>
constexpr std::array<float, kCount> scalarValues(int middle, int scale) {
  std::array<float, kCount> values{};
  for (size_t i = 0; i < kCount; ++i)
    values[i] = static_cast<float>(exponential((static_cast<int>(i) + 1.0 - middle) / scale));
  return values;
}

// Where number i begins: the least float32 of exp((i - 1/2 - middle) / scale) and more, for i = 2, 3 ...
template <size_t kCount>
constexpr std::array<float, kCount> scalarBounds(int middle, int scale) {
  std::array<float, kCount> bounds{};
  for (size_t i = 0; i < kCount; ++i)
    bounds[i] = leastFrom(exponential((static_cast<int>(i) + 1.5 - middle) / scale));
  return bounds;
}

inline constexpr auto kLogByteValues = scalarValues<127>(64, 8);
inline constexpr auto kLogByteBounds = scalarBounds<126>(64, 8);
inline constexpr auto kLog9Values = scalarValues<255>(128, 16);
inline constexpr auto kLog9Bounds = scalarBounds<254>(128, 16);

// A scalar codec as numbers: what its codes and values are made with (FORMAT.md, "Scalars").
struct ScalarTable {
  uint32_t bits;     // of a code, its sign included
  uint32_t last;     // bounds there are
  uint32_t factor;   // 2^9 times the numbers in an octave
  float value[256];  // of a number; 0 of number 0
  float bound[256];  // where numbers 2 and up begin; then infinity
};

constexpr ScalarTable scalarTable(uint32_t bits, uint32_t factor, std::span<const float> values,
                                  std::span<const float> bounds) {
  ScalarTable table{};
  table.bits = bits;
  table.factor = factor;
  table.last = static_cast<uint32_t>(bounds.size());
  for (uint32_t i = 0; i < 256; ++i) {
    table.value[i] = i > 0 && i <= values.size() ? values[i - 1] : 0;
    table.bound[i] = i < bounds.size() ? bounds[i] : std::numeric_limits<float>::infinity();
  }
  return table;
}

inline constexpr ScalarTable kLogByteTable = scalarTable(8, 2839, kLogByteValues, kLogByteBounds);  // 8·ln 2
inline constexpr ScalarTable kLog9Table = scalarTable(9, 5678, kLog9Values, kLog9Bounds);           // 16·ln 2

// The number of a finite magnitude that is not 0: 1 and the bounds at or below it.
//
// A float's bits are its logarithm to base 2, up to 0.087 too small, in units of 2^-23. So the difference of two bits,
// in numbers, is off by less than 1, and the bounds below are as many as its whole part, or one or two more.
inline uint32_t scalarNumber(const ScalarTable& table, uint32_t magnitude) {
  const uint32_t first = floatBits(table.bound[0]);
  const uint32_t above = magnitude > first ? magnitude - first : 0;
  uint32_t below = static_cast<uint32_t>(uint64_t{above} * table.factor >> 32);
  if (below > table.last) below = table.last;
  const float x = floatOf(magnitude);
  return 1 + below + (table.bound[below] <= x ? 1 : 0) + (table.bound[below + 1] <= x ? 1 : 0);
}

// The sign above the number, 0 for a zero; a sign and 0 for no number.
inline uint32_t scalarCode(const ScalarTable& table, float x) {
  const uint32_t magnitude = floatBits(x) & 0x7fffffffu, sign = 1u << (table.bits - 1);
  if (magnitude >= 0x7f800000u) return sign;
  if (magnitude == 0) return 0;
  return scalarNumber(table, magnitude) | (floatBits(x) >> 31 ? sign : 0);
}

inline float scalarValue(const ScalarTable& table, uint32_t code) {
  const uint32_t sign = 1u << (table.bits - 1);
  if (code == sign) return floatOf(0x7fc00000u);
  const float value = table.value[code & (sign - 1)];
  return code & sign ? -value : value;
}

}  // namespace lowcomm
