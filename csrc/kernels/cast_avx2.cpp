// AVX2 and F16C. No STL or torch inline code here (lanes.inl says why).
#include "kernels/cast.h"

#include "kernels/table.h"

#if defined(__AVX2__) && defined(__F16C__)
#include "kernels/lanes_avx2.inl"
//
#include "kernels/cast_vector.inl"

namespace lowcomm::avx2 {

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

}  // namespace lowcomm::avx2

#endif
