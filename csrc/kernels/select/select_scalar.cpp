// The reference of the selection's loops.
#include "base/half.h"
#include "kernels/isa/table.h"
#include "kernels/select/select.h"

namespace lowcomm {
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

}  // namespace

namespace scalar {
constexpr SelectKernels kSelect = {count, gather, mark};
}  // namespace scalar

}  // namespace lowcomm
