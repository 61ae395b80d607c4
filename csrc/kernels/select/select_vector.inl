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

// How many of n magnitudes, a multiple of 16, are above `limit`.
LOWCOMM_INLINE size_t countAbove(const uint32_t* magnitudes, size_t n, uint32_t limit) {
  Integers counts{};
  for (size_t i = 0; i < n; i += kLanes)
    counts -= (Integers)((Integers)loadWords(magnitudes + i) > (Integers)splatWord(limit));
  int32_t count = 0;
  for (int lane = 0; lane < kLanes; ++lane)
    count += counts[lane];
  return static_cast<size_t>(count);
}

// The k-th largest of n magnitudes, without its bits below `lowest`: the largest such number that k of them reach.
// Zeros up to a multiple of 16 are appended; n becomes this multiple.
LOWCOMM_INLINE uint32_t kthLargest(uint32_t* magnitudes, size_t& n, size_t k, int lowest) {
  for (; n % 16 != 0; ++n)
    magnitudes[n] = 0;
  uint32_t kth = 0;
  for (int bit = 30; bit >= lowest; --bit) {
    const uint32_t higher = kth | 1u << bit;
    if (countAbove(magnitudes, n, higher - 1) >= k) kth = higher;
  }
  return kth;
}

// The largest magnitude of each lane in blocks of `rows` rows of 16. Returns how many there are.
LOWCOMM_INLINE size_t laneMaxima(uint32_t* maxima, const float* x, size_t n, size_t rows) {
  size_t found = 0;
  for (size_t at = 0; at + rows * 16 <= n; at += rows * 16, found += 16) {
    Integers most[kRegistersARow] = {};
    for (size_t row = at; row < at + rows * 16; row += 16) {
      for (int j = 0; j < kRegistersARow; ++j) {
        const Integers magnitude = (Integers)(loadWords(x + row + j * kLanes) & kMagnitude);
        most[j] = magnitude > most[j] ? magnitude : most[j];
      }
    }
    for (int j = 0; j < kRegistersARow; ++j)
      storeWords(maxima + found + j * kLanes, (Words)most[j]);
  }
  return found;
}

// The magnitudes of at least `least` and their places, in order. Returns how many there are.
LOWCOMM_INLINE size_t candidates(uint16_t* places, uint32_t* magnitudes, const float* x, size_t n, uint32_t least) {
  const Integers limit = (Integers)splatWord(least - 1);  // signed: -1 for 0
  size_t found = 0, at = 0;
  for (; at + 64 <= n; at += 64) {
    for (size_t line = 0; line < 64; line += 16)
      __builtin_prefetch(x + at + n + line);  // the next chunk, while there is time
    uint64_t above = 0;
    for (size_t j = 0; j < 64; j += kLanes)
      above |= uint64_t{maskOf((Words)((Integers)(loadWords(x + at + j) & kMagnitude) > limit))} << j;
    for (; above != 0; above &= above - 1, ++found) {
      const size_t place = at + static_cast<size_t>(__builtin_ctzll(above));
      places[found] = static_cast<uint16_t>(place);
      magnitudes[found] = magnitudeOf(x + place);
    }
  }
  for (; at < n; ++at) {
    places[found] = static_cast<uint16_t>(at);
    magnitudes[found] = magnitudeOf(x + at);
    found += magnitudes[found] >= least;
  }
  return found;
}

// At least k groups of elements are given: the k-th largest of their maxima is then no more than the k-th largest
// element. Few elements reach it, and among them the k largest are found.
void largest(uint16_t* places, uint32_t* magnitudes, const float* x, size_t n, size_t k) {
  constexpr size_t kGroups = 4;  // for each element that is selected
  const size_t rows = n / k / kGroups;
  size_t groups = rows > 1 ? laneMaxima(magnitudes, x, n, rows) : 0;
  const uint32_t least = groups >= k ? kthLargest(magnitudes, groups, k, 12) : 0;
  const size_t found = candidates(places, magnitudes, x, n, least);
  size_t padded = found;
  const uint32_t threshold = kthLargest(magnitudes, padded, k, 0);
  size_t ties = k - countAbove(magnitudes, padded, threshold), kept = 0;
  for (size_t i = 0; i < found; ++i) {
    const bool tie = magnitudes[i] == threshold && ties > 0;
    places[kept] = places[i];
    kept += tie || magnitudes[i] > threshold;
    ties -= tie;
  }
}

}  // namespace
}  // namespace lowcomm

// A form's table of them.
#define LOWCOMM_SELECT_FORM(form)                                   \
  namespace lowcomm::form {                                         \
  constexpr SelectKernels kSelect = {count, gather, mark, largest}; \
  }
