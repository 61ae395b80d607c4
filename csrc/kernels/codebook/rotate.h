#pragma once

#include <cstddef>
#include <cstdint>

namespace lowcomm {

// The rotation of `gauss` and `rotate=1` (FORMAT.md, "Rotation"): in each block of 512 elements, 32 rows of 16 lanes,
// signs and a Walsh-Hadamard transform along the rows of every lane. Orthonormal, so its inverse is itself with the
// signs last. It makes any tensor's elements nearly normal, which a grid, and a table for the normal distribution more
// so, then serves equally well.

inline constexpr float kRotationScale = 0x1.6a09e6p-3f;  // 32^-1/2

// Row r of lane l changes its sign where bit r of this word is set: word l mod 4 of philox(l / 4) under key 0.
inline constexpr uint32_t kRotationSigns[16] = {
    0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u, 0xf8e4cca4u, 0x5cb200dbu, 0xb1a574ebu, 0x097eff67u,
    0x04faa329u, 0x51c732a6u, 0x241513adu, 0x459135e4u, 0xc990ef29u, 0x6a4474a6u, 0x9ac9134fu, 0x6d413e04u};

// The loops of one instruction set. Pointers need only the alignment of their type; no function allocates or throws;
// all are called under FloatEnv. Blocks are counted from the pointers.
//
// rotate: y[0, count rounded up to 512) = rotated x[0, count), zeros standing in for what x lacks; y may be x, where
// its memory goes on that far. Returns false when an element of x is not finite or is kRotatedLimit or more in
// magnitude (kernels/finite.h): y is then without meaning.
//
// unrotate[add]: y[0, count) = x[0, count rounded up to 512) rotated back, or += that; y may be x.
struct RotationLoops {
  using Rotate = bool (*)(float* y, const float* x, size_t count);
  using Unrotate = void (*)(float* y, const float* x, size_t count);

  Rotate rotate;
  Unrotate unrotate[2];
};

}  // namespace lowcomm
