// NEON. No STL or torch inline code here (lanes.inl says why).
#include "kernels/cast.h"

#include "kernels/table.h"

// The loops take memory as little-endian words.
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include "kernels/lanes_neon.inl"
//
#include "kernels/cast_vector.inl"

namespace lowcomm::neon {

void halvesToFloats(float* y, const uint16_t* x, size_t count) {
  expand<Half>(y, x, count);
}
void floatsToHalves(uint16_t* y, const float* x, size_t count) {
  convert<Half>(y, x, count);
}
void brainsToFloats(float* y, const uint16_t* x, size_t count) {
  expand<Brain>(y, x, count);
}
void floatsToBrains(uint16_t* y, const float* x, size_t count) {
  convert<Brain>(y, x, count);
}

const CastKernels kCasts = LOWCOMM_CAST_LOOPS;

}  // namespace lowcomm::neon

#endif
