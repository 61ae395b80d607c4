#pragma once

#include <cstddef>
#include <cstdint>

namespace lowcomm {

// The k largest magnitudes of a tensor and where they are (FORMAT.md, "topk"), in time O(n) for any data. Magnitudes
// are compared as the integers their bits without the sign are: infinities above all numbers, NaN above those.

inline constexpr int kDigitBits = 11;  // of a magnitude's 31, from the top
inline constexpr size_t kDigits = size_t{1} << kDigitBits;
inline constexpr int kDigitShift = 31 - kDigitBits;
inline constexpr size_t kSlack = 16;  // elements past the last one that `gather` and `mark` may overwrite

// The loops over all elements. Every form of them gives the same values.
struct SelectKernels {
  // counts[d] += how many magnitudes have the top digit d.
  void (*count)(uint64_t* counts, const float* x, size_t n);

  // Writes the bits of all magnitudes with that top digit to `to`, in order; returns how many.
  size_t (*gather)(uint32_t* to, const float* x, size_t n, uint32_t digit);

  // Selects magnitudes above `threshold` and the first `ties` that equal it: a bit each in `bitmap` (ceil(n / 64)
  // words, element e at bit e mod 64 of word e div 64, the rest 0), their elements to `values`, in order. Returns how
  // many.
  size_t (*mark)(uint64_t* bitmap, float* values, const float* x, size_t n, uint32_t threshold, size_t ties);

  // Writes the places of the k largest of n magnitudes to `places`, ascending; 1 <= k <= n <= 65,536, of equal ones
  // those with the lower index. `magnitudes` is scratch; both have n + kSlack elements.
  void (*largest)(uint16_t* places, uint32_t* magnitudes, const float* x, size_t n, size_t k);
};

// Selects the k largest magnitudes, 1 <= k <= n, of equal ones those with the lower index: bitmap as above, `values`
// of k + kSlack floats. Allocates.
void selectLargest(uint64_t* bitmap, float* values, const float* x, size_t n, size_t k, const SelectKernels& kernels);

// acc[e] += value for the elements of a bitmap, `values` in their order; called under FloatEnv.
void addSelected(float* acc, const uint64_t* bitmap, size_t n, const float* values);

}  // namespace lowcomm
