// AVX2 and F16C. No STL or torch inline code here (lanes.inl says why).
#include <cstddef>
#include <cstdint>

#include "kernels/codebook.h"
#include "kernels/finite.h"
#include "kernels/grid_scale.h"
#include "kernels/table.h"

#if defined(__AVX2__) && defined(__F16C__)
#include "kernels/lanes_avx2.inl"
//
#include "kernels/grid_vector.inl"

namespace lowcomm {
namespace {

constexpr KernelTable kTable = {"avx2",
                                LOWCOMM_GRID_LOOPS,
                                &kAvx2Codebooks,
                                &kAvx2Rotation,
                                avx2::halvesToFloats,
                                avx2::floatsToHalves,
                                avx2::brainsToFloats,
                                avx2::floatsToBrains,
                                combine<false>,
                                combine<true>,
                                &avx2::kCasts,
                                &avx2::kChannels,
                                &avx2::kSelect};

}  // namespace

const KernelTable* avx2Kernels() {
  return &kTable;
}

}  // namespace lowcomm

#else

namespace lowcomm {
const KernelTable* avx2Kernels() {
  return nullptr;
}
}  // namespace lowcomm

#endif
