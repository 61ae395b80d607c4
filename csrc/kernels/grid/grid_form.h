#pragma once

#include <cstddef>
#include <cstdint>

namespace lowcomm {

struct Codebook;

// How an element becomes a code: one loop each (FORMAT.md, "Codes").
enum class GridRule : uint8_t {
  nearest,     // minmax
  stochastic,  // qsgd: a random byte an element
  dithered,    // lattice: one random number a bucket
  centred,     // sym, mid: nearest on a grid around 0
  sign,        // sign1: below 0 or not; at 1 bit only
  levels,      // by the thresholds of a codebook between a bucket's ends: kernels/codebook/codebook.h has the loops
  gauss,       // by those of one around 0; the loops there too
};
inline constexpr int kGridRules = 5;  // those of KernelTable::encode_grid

// How a code becomes a value.
enum class GridValue : uint8_t { affine, centred, levels, gauss };

// The other parameters of a grid codec's loops; read once a bucket or block, never an element.
struct GridForm {
  uint32_t bucket = 0;  // elements sharing one scale, a power of two from 64 on
  bool bf16 = false;  // metadata are bfloat16: rounded so that no element falls off the grid, and encoded with as sent

  // Memory that will be read once the elements are encoded: 4 bytes an element from here on are fetched in
  // passing, without access to them. Null: what lies 8 KiB after the elements themselves.
  const void* soon = nullptr;

  // Centred and sign only; FORMAT.md, "Codecs around 0", has them by codec. s is the bucket's range.
  bool rms = false;     // s = 2·rms(x), else max |x| (centred) or mean |x| (sign)
  float divisor = 1;    // what is sent is s / divisor
  float numerator = 0;  // t = x·(numerator / s), then held to low...high
  float low = 0, high = 0;
  float magic = 0;   // the code is fixed(t + magic) >> 15
  float centre = 0;  // decoded: (u - centre)·(unit·sent)
  float unit = 1;

  const Codebook* book = nullptr;  // levels and gauss
  float gain = 1;                  // gauss: every value is multiplied by it
  size_t absent = 0;  // elements of the last bucket that its mean and rms do not count: zeros that fill a block up
};

}  // namespace lowcomm
