#include "kernels/select/select.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "base/host_device.h"
#include "kernels/isa/table.h"

namespace lowcomm {

// ---- the reference of the loops ----

namespace {

uint32_t magnitudeOf(float x) {
  return floatBits(x) & 0x7fffffffu;
}

void count(uint64_t* counts, const float* x, size_t n) {
  for (size_t i = 0; i < n; ++i)
    ++counts[magnitudeOf(x[i]) >> kDigitShift];
}

size_t gather(uint32_t* to, const float* x, size_t n, uint32_t digit) {
  size_t found = 0;
  for (size_t i = 0; i < n; ++i) {
    if (magnitudeOf(x[i]) >> kDigitShift == digit) to[found++] = magnitudeOf(x[i]);
  }
  return found;
}

size_t mark(uint64_t* bitmap, float* values, const float* x, size_t n, uint32_t threshold, size_t ties) {
  size_t found = 0;
  for (size_t at = 0; at < n; at += 64) {
    uint64_t bits = 0;
    for (size_t i = at; i < n && i < at + 64; ++i) {
      const uint32_t magnitude = magnitudeOf(x[i]);
      const bool tie = magnitude == threshold && ties > 0;
      if (tie) --ties;
      if (magnitude <= threshold && !tie) continue;
      bits |= uint64_t{1} << (i - at);
      values[found++] = x[i];
    }
    *bitmap++ = bits;
  }
  return found;
}

void largest(uint16_t* places, uint32_t* magnitudes, const float* x, size_t n, size_t k) {
  std::transform(x, x + n, magnitudes, magnitudeOf);
  std::nth_element(magnitudes, magnitudes + (k - 1), magnitudes + n, std::greater<>());
  const uint32_t threshold = magnitudes[k - 1];
  ptrdiff_t ties =
      static_cast<ptrdiff_t>(k) - std::count_if(x, x + n, [&](float v) { return magnitudeOf(v) > threshold; });
  for (size_t i = 0; i < n; ++i) {
    const uint32_t magnitude = magnitudeOf(x[i]);
    if (magnitude > threshold || (magnitude == threshold && ties-- > 0)) *places++ = static_cast<uint16_t>(i);
  }
}

}  // namespace

namespace scalar {
constexpr SelectKernels kSelect = {count, gather, mark, largest};
}  // namespace scalar

// ---- what is made of them ----

namespace {

// The digit in which the k-th largest stands, counted from 1; k becomes its number among those with the digit.
uint32_t digitOf(const std::vector<uint64_t>& counts, size_t& k) {
  uint32_t digit = static_cast<uint32_t>(counts.size() - 1);
  while (counts[digit] < k)
    k -= counts[digit--];
  return digit;
}

}  // namespace

void selectLargest(uint64_t* bitmap, float* values, const float* x, size_t n, size_t k, const SelectKernels& kernels) {
  std::vector<uint64_t> counts(kDigits);
  kernels.count(counts.data(), x, n);
  size_t left = k;
  uint32_t threshold = digitOf(counts, left);

  // The few that share the threshold's top digit decide the rest of it, 10 bits at a time.
  const auto candidates = std::make_unique_for_overwrite<uint32_t[]>(counts[threshold] + kSlack);
  uint32_t* end = candidates.get() + kernels.gather(candidates.get(), x, n, threshold);
  constexpr int kLowBits = 10;
  for (int shift = kDigitShift - kLowBits; shift >= 0; shift -= kLowBits) {
    const auto digit = [&](uint32_t magnitude) { return magnitude >> shift & ((1u << kLowBits) - 1); };
    counts.assign(size_t{1} << kLowBits, 0);
    std::for_each(candidates.get(), end, [&](uint32_t magnitude) { ++counts[digit(magnitude)]; });
    const uint32_t chosen = digitOf(counts, left);
    end = std::copy_if(candidates.get(), end, candidates.get(), [&](uint32_t m) { return digit(m) == chosen; });
    threshold = threshold << kLowBits | chosen;
  }
  kernels.mark(bitmap, values, x, n, threshold, left);
}

void addSelected(float* acc, const uint64_t* bitmap, size_t n, const float* values) {
  for (size_t word = 0; word * 64 < n; ++word) {
    for (uint64_t bits = bitmap[word]; bits != 0; bits &= bits - 1)
      acc[word * 64 + static_cast<size_t>(std::countr_zero(bits))] += *values++;
  }
}

}  // namespace lowcomm
