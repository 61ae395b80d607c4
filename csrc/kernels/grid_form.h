#pragma once

#include <cstdint>

namespace lowcomm {

// How an element becomes a code: one loop each (FORMAT.md, "Codes").
enum class GridRule : uint8_t {
  nearest,     // minmax
  stochastic,  // qsgd: a random byte an element
  dithered,    // dither, lattice: one random number a bucket
};
inline constexpr int kGridRules = 3;

// What else a grid codec's loops need to know; read once a bucket or block, never an element.
struct GridForm {
  uint32_t bucket = 0;   // elements sharing one scale, a power of two from 64 on
  bool shifted = false;  // dithered: the base is sent moved by the bucket's draw (lattice)
  float delta = 0;       // the step itself where it is not 0; a bucket whose range is above K·delta is refused
};

}  // namespace lowcomm
