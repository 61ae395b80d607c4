// NEON. No STL or torch inline code here (lanes.inl says why).
#include <cstddef>
#include <cstdint>

#include "kernels/low_rank.h"

// As the other loops on lanes_neon.inl: memory as little-endian words.
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include "kernels/lanes_neon.inl"
//
#include "kernels/low_rank_vector.inl"

namespace lowcomm {
const LowRankKernels* neonLowRank() {
  return &kLowRank;
}
}  // namespace lowcomm

#else

namespace lowcomm {
const LowRankKernels* neonLowRank() {
  return nullptr;
}
}  // namespace lowcomm

#endif
