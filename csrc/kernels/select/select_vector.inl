// The loops of select.cpp on the vectors of lanes.inl, compiled once an instruction set.

#include <cstddef>
#include <cstdint>

#include "kernels/isa/table.h"
#include "kernels/select/select.h"
//
#include "kernels/isa/lanes.inl"

namespace lowcomm {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr size_t kAhead = 8192;  // bytes prefetched ahead

LOWCOMM_INLINE uint32_t magnitudeOf(const float* x) {
  uint32_t bits;
  __builtin_memcpy(&bits, x, 4);
  return bits & kMagnitude;
}

// Neighbours nearly always have the same few digits: four tables, so that no count waits for the one before it.
void count(uint64_t* counts, const float* x, size_t n) {
  constexpr size_t kMost = size_t{1} << 30;  // that a 32-bit count can take
  for (size_t done = 0; done < n;) {
    const size_t part = n - done < kMost ? n - done : kMost;
    uint32_t tables[4][kDigits] = {};
    const float* from = x + done;
    size_t i = 0;
    for (; i + 16 <= part; i += 16) {
      __builtin_prefetch(reinterpret_cast<const char*>(from + i) + kAhead);
      for (size_t j = 0; j < 16; ++j)
        ++tables[j % 4][magnitudeOf(from + i + j) >> kDigitShift];
    }
    for (; i < part; ++i)
      ++tables[0][magnitudeOf(from + i) >> kDigitShift];
    for (size_t digit = 0; digit < kDigits; ++digit)
      counts[digit] += uint64_t{tables[0][digit]} + tables[1][digit] + tables[2][digit] + tables[3][digit];
    done += part;
  }
}

size_t gather(uint32_t* to, const float* x, size_t n, uint32_t digit) {
  const Words low = splatWord(digit << kDigitShift);
  size_t found = 0, i = 0;
  for (; i + 16 <= n; i += 16) {
    __builtin_prefetch(reinterpret_cast<const char*>(x + i) + kAhead);
    for (size_t j = 0; j < 16; j += kLanes) {
      const Words magnitude = loadWords(x + i + j) & kMagnitude;
      const uint32_t mask = maskOf((Words)((magnitude & (0xffffffffu << kDigitShift)) == low));
      storeSelected(to + found, (Floats)magnitude, mask);
      found += static_cast<size_t>(__builtin_popcount(mask));
    }
  }
  for (; i < n; ++i) {
    if (magnitudeOf(x + i) >> kDigitShift == digit) to[found++] = magnitudeOf(x + i);
  }
  return found;
}

// The lowest `count` bits that are set.
LOWCOMM_INLINE uint64_t lowestBits(uint64_t bits, size_t count) {
  uint64_t rest = bits;
  for (; count > 0 && rest != 0; --count)
    rest &= rest - 1;
  return bits & ~rest;
}

size_t mark(uint64_t* bitmap, float* values, const float* x, size_t n, uint32_t threshold, size_t ties) {
  const Integers limit = (Integers)splatWord(threshold);
  size_t found = 0;
  for (size_t at = 0; at < n; at += 64) {
    float padded[64] = {};
    const float* from = x + at;
    const size_t count = n - at < 64 ? n - at : 64;
    if (count < 64) {
      __builtin_memcpy(padded, from, count * sizeof(float));
      from = padded;
    }
    for (size_t line = 0; line < 64; line += 16)
      __builtin_prefetch(reinterpret_cast<const char*>(x + at + line) + kAhead);
    uint64_t above = 0, equal = 0;
    for (size_t j = 0; j < 64; j += kLanes) {
      const Integers magnitude = (Integers)(loadWords(from + j) & kMagnitude);
      above |= uint64_t{maskOf((Words)(magnitude > limit))} << j;
      equal |= uint64_t{maskOf((Words)(magnitude == limit))} << j;
    }
    if (count < 64) equal &= (uint64_t{1} << count) - 1;  // the padding is as small as a threshold of 0
    if (equal != 0 && ties > 0) {
      const uint64_t taken = lowestBits(equal, ties);
      ties -= static_cast<size_t>(__builtin_popcountll(taken));
      above |= taken;
    }
    *bitmap++ = above;
    for (size_t j = 0; j < 64; j += kLanes) {
      const uint32_t mask = static_cast<uint32_t>(above >> j) & ((1u << kLanes) - 1);
      storeSelected(values + found, load(from + j), mask);
      found += static_cast<size_t>(__builtin_popcount(mask));
    }
  }
  return found;
}

}  // namespace
}  // namespace lowcomm

// A form's table of them.
#define LOWCOMM_SELECT_FORM(form)                          \
  namespace lowcomm::form {                                \
  constexpr SelectKernels kSelect = {count, gather, mark}; \
  }
