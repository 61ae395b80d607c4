// AVX2. No STL or torch inline code here (lanes.inl says why).
#include <cstddef>
#include <cstdint>

#include "kernels/low_rank.h"

#if defined(__AVX2__)
#include "kernels/lanes_avx2.inl"
//
#include "kernels/low_rank_vector.inl"

namespace lowcomm {
const LowRankKernels* avx2LowRank() {
  return &kLowRank;
}
}  // namespace lowcomm

#else

namespace lowcomm {
const LowRankKernels* avx2LowRank() {
  return nullptr;
}
}  // namespace lowcomm

#endif
