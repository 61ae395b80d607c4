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

// What a delta of 4 bits must do to memory: `count` floats x (a multiple of 256) and as many elements of a memory m of
// 2 or 4 bytes are read, m is written and an eighth of x's bytes too. m stays what it was where mask is 0.
template <bool kPrefetch, size_t kBytes>
STREAM inline void encodeDelta(char* m, const float* x, char* codes, size_t count, uint32_t mask) {
  constexpr size_t kEach = kWidth * 4 / kBytes;  // floats to a register of m
  for (size_t i = 0; i < count; i += 8 * kWidth) {
    Words sum{};
    for (size_t j = 0; j < 8 * kWidth; j += kEach) {
      const float* from = x + i + j;
      Words value{};
      for (size_t k = 0; k < kEach; k += kWidth) {
        if (kPrefetch && (j + k) % 16 == 0) __builtin_prefetch(from + k + kAhead / 2);
        value ^= *reinterpret_cast<const Words*>(from + k);
      }
      char* to = m + (i + j) * kBytes;
      if (kPrefetch && j * kBytes % 64 == 0) __builtin_prefetch(to + kAhead / 2 * kBytes);
      sum = *reinterpret_cast<Words*>(to) + (value & mask);
      *reinterpret_cast<Words*>(to) = sum;
    }
    *reinterpret_cast<Words*>(codes + i / 2) = sum;
  }
}

// The same for its decoding: codes are read, m is read and written, and floats y are written.
template <bool kPrefetch, size_t kBytes>
STREAM inline void decodeDelta(float* y, char* m, const char* codes, size_t count, uint32_t mask) {
  constexpr size_t kEach = kWidth * 4 / kBytes;
  for (size_t i = 0; i < count; i += 8 * kWidth) {
    const Words code = *reinterpret_cast<const Words*>(codes + i / 2) & mask;
    for (size_t j = 0; j < 8 * kWidth; j += kEach) {
      float* out = y + i + j;
      char* to = m + (i + j) * kBytes;
      if (kPrefetch && j * kBytes % 64 == 0) __builtin_prefetch(to + kAhead / 2 * kBytes);
      const Words sum = *reinterpret_cast<Words*>(to) + code;
      *reinterpret_cast<Words*>(to) = sum;
      for (size_t k = 0; k < kEach; k += kWidth) {
        if (kPrefetch && (j + k) % 16 == 0) __builtin_prefetch(out + k + kAhead / 2, 1);
        *reinterpret_cast<Words*>(out + k) = sum;
      }
    }
  }
}

}  // namespace streams
