// AVX-512 F, BW, DQ and VL. No STL or torch inline code here (lanes.inl says why).
#include <cstddef>
#include <cstdint>

#include "kernels/low_rank.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
// GCC 12 warns of its own header's _mm512_undefined_epi32.
#pragma GCC diagnostic ignored "-Wuninitialized"
#include "kernels/lanes_avx512.inl"
//
#include "kernels/low_rank_vector.inl"

namespace lowcomm {
const LowRankKernels* avx512LowRank() {
  return &kLowRank;
}
}  // namespace lowcomm

#else

namespace lowcomm {
const LowRankKernels* avx512LowRank() {
  return nullptr;
}
}  // namespace lowcomm

#endif
