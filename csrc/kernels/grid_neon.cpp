// NEON. No STL or torch inline code here (lanes.inl says why).
#include <cstddef>
#include <cstdint>

#include "kernels/codebook.h"
#include "kernels/finite.h"
#include "kernels/grid_scale.h"
#include "kernels/table.h"

// The loops take memory as little-endian words.
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include "kernels/lanes_neon.inl"
//
#include "kernels/grid_vector.inl"

namespace lowcomm {
namespace {

constexpr KernelTable kTable = {"neon",
                                LOWCOMM_GRID_LOOPS,
                                &kNeonCodebooks,
                                &kNeonRotation,
                                neon::halvesToFloats,
                                neon::floatsToHalves,
                                neon::brainsToFloats,
                                neon::floatsToBrains,
                                combine<false>,
                                combine<true>,
                                &neon::kCasts,
                                &neon::kChannels,
                                &neon::kSelect};

}  // namespace

const KernelTable* neonKernels() {
  return &kTable;
}

}  // namespace lowcomm

#else

namespace lowcomm {
const KernelTable* neonKernels() {
  return nullptr;
}
}  // namespace lowcomm

#endif
