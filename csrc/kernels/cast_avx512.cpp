// AVX-512 F, BW, DQ and VL. No STL or torch inline code here (lanes.inl says why).
#include "kernels/cast.h"

#include "kernels/table.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "kernels/lanes_avx512.inl"
//
#include "kernels/cast_vector.inl"

namespace lowcomm::avx512 {

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

}  // namespace lowcomm::avx512

#endif
