#pragma once

// The bounds of codec_perf: the fastest plain loops over memory that one core of this machine runs. Each with and
// without prefetches of its own: on some processors they help, on others they stand in the way of those that the
// hardware makes, so both are measured and the faster counts.

#include <cstddef>
#include <cstdint>

namespace streams {

#if defined(__x86_64__)
#define STREAM __attribute__((target("avx2"), noinline))
constexpr size_t kWidth = 8;
#else
#define STREAM __attribute__((noinline))
constexpr size_t kWidth = 4;
#endif
typedef uint32_t Words __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef float Floats __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));

constexpr size_t kAhead = 2048;  // elements prefetched ahead: 8 KiB

// Reads count floats (a multiple of 64).
template <bool kPrefetch>
STREAM inline uint32_t read(const float* x, size_t count) {
  Words sum[4] = {};
  for (size_t i = 0; i < count; i += 4 * kWidth) {
    if (kPrefetch) __builtin_prefetch(x + i + kAhead);
    if (kPrefetch) __builtin_prefetch(x + i + kAhead + 16);
    for (size_t j = 0; j < 4; ++j)
      sum[j] |= *reinterpret_cast<const Words*>(x + i + j * kWidth);
  }
  const Words all = sum[0] | sum[1] | sum[2] | sum[3];
  return all[0] | all[kWidth - 1];
}

// y[i] += c for count floats (a multiple of 64).
template <bool kPrefetch>
STREAM inline void addInPlace(float* y, size_t count, float c) {
  for (size_t i = 0; i < count; i += 4 * kWidth) {
    if (kPrefetch) __builtin_prefetch(y + i + kAhead);
    if (kPrefetch) __builtin_prefetch(y + i + kAhead + 16);
    for (size_t j = 0; j < 4; ++j)
      *reinterpret_cast<Floats*>(y + i + j * kWidth) += c;
  }
}

}  // namespace streams
