// AVX-512 F, BW, DQ and VL. No STL or torch inline code here (lanes.inl says why).
#include <cstddef>
#include <cstdint>

#include "kernels/codebook.h"
#include "kernels/finite.h"
#include "kernels/grid_scale.h"
#include "kernels/table.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "kernels/lanes_avx512.inl"
//
#include "kernels/grid_vector.inl"

namespace lowcomm {
namespace {

constexpr KernelTable kTable = {"avx512",
                                LOWCOMM_GRID_LOOPS,
                                &kAvx512Codebooks,
                                &kAvx512Rotation,
                                avx512::halvesToFloats,
                                avx512::floatsToHalves,
                                avx512::brainsToFloats,
                                avx512::floatsToBrains,
                                combine<false>,
                                combine<true>,
                                &avx512::kCasts,
                                &avx512::kChannels,
                                &avx512::kSelect};

}  // namespace

const KernelTable* avx512Kernels() {
  return &kTable;
}

}  // namespace lowcomm

#else

namespace lowcomm {
const KernelTable* avx512Kernels() {
  return nullptr;
}
}  // namespace lowcomm

#endif
