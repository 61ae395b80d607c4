#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "kernels/philox.h"

namespace lowcomm {

// A perturbation is made of random words here: one definition for the scalar loops and the CUDA kernels, the
// polynomials for the vector form too. FORMAT.md, "Perturbations". IEEE +, -, x and square root only, each rounded,
// none fused.

inline constexpr uint64_t kGaussianBlock = 64;      // elements of 16 calls, four each
inline constexpr uint64_t kRademacherBlock = 2048;  // elements of 16 calls, 128 each
inline constexpr uint64_t kNoiseLanes = 16;
inline constexpr size_t kNoiseGroup = 4;  // terms that are summed before they join the others

// Minimax polynomials, fitted for this format and rounded to fp32; V is a float or a vector of them.

// P: -2·ln(1 + f) = f·P(f) for 1 + f in [sqrt(1/2), sqrt(2)].
template <typename V>
LOWCOMM_RULE V logP(V f) {
  return ((((f * 0x1.261c62p-2f + -0x1.c89baap-2f) * f + 0x1.04a5f8p-1f) * f + -0x1.544858p-1f) * f + 0x1.ffdbf6p-1f) *
             f +
         -0x1.0000bap+1f;
}
inline constexpr float kMinusTwoLn2 = -0x1.62e430p+0f;

// S and C of x·x: -sin(pi·x) = x·S and cos(pi·x) = C for x in [-1/2, 1/2].
template <typename V>
LOWCOMM_RULE V sineS(V square) {
  return ((square * 0x1.1bf946p-1f + -0x1.455cf2p+1f) * square + 0x1.4ab278p+2f) * square + -0x1.921f5cp+1f;
}
template <typename V>
LOWCOMM_RULE V cosineC(V square) {
  return ((square * -0x1.38dd76p+0f + 0x1.02a468p+2f) * square + -0x1.3bc5a4p+2f) * square + 0x1.ffff20p-1f;
}

inline constexpr uint32_t kSqrtHalfBits = 0x3f3504f3u;  // of sqrt(1/2): where an octave starts
inline constexpr float kLargestU = 0x1.fffffep+23f;     // 2^24 - 1: u = 1 would have the radius 0

// sqrt(-2·ln(u)) for u = (word div 2^8 + 1/2)·2^-24.
LOWCOMM_HOST_DEVICE inline float gaussianRadius(uint32_t word) {
  float u = static_cast<float>(word >> 8) + 0.5f;
  u = (u < kLargestU ? u : kLargestU) * 0x1p-24f;
  const uint32_t bits = floatBits(u);
  const int32_t octave = static_cast<int32_t>(bits - kSqrtHalfBits) >> 23;
  const float f = floatOf(bits - (static_cast<uint32_t>(octave) << 23)) - 1.0f;
  return squareRoot(static_cast<float>(octave) * kMinusTwoLn2 + f * logP(f));
}

// Cosine and sine of word div 2^8 · 2^-24 turns.
struct CosineSine {
  float cosine, sine;
};
LOWCOMM_HOST_DEVICE inline CosineSine cosineSine(uint32_t word) {
  // Half turns: an integer number of them, which is a sign, a half and x.
  const float x = floatOf((word >> 8 & 0x7fffffu) | 0x3f800000u) - 1.5f;
  const float square = x * x;
  const float cosine = sineS(square) * x, sine = cosineC(square);
  const uint32_t sign = word & 0x80000000u;
  return {floatOf(floatBits(cosine) ^ sign), floatOf(floatBits(sine) ^ sign)};
}

// The four elements of a call, one a row of the block.
LOWCOMM_HOST_DEVICE inline void gaussianRows(float (&z)[4], const PhiloxWords& words) {
  for (int pair = 0; pair < 2; ++pair) {
    const float radius = gaussianRadius(words.word[2 * pair]);
    const CosineSine angle = cosineSine(words.word[2 * pair + 1]);
    z[2 * pair] = radius * angle.cosine;
    z[2 * pair + 1] = radius * angle.sine;
  }
}

// The element of row 0...127 of a block.
LOWCOMM_HOST_DEVICE inline float rademacherRow(const PhiloxWords& words, uint32_t row) {
  return words.word[row / 32] >> (row % 32) & 1u ? 1.0f : -1.0f;
}

}  // namespace lowcomm
