// NEON. No STL or torch inline code here (lanes.inl says why).
#include "kernels/select.h"

#include "kernels/table.h"

// The loops take memory as little-endian words.
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include "kernels/lanes_neon.inl"
//
#include "kernels/select_vector.inl"

namespace lowcomm::neon {
const SelectKernels kSelect = {count, gather, mark};
}  // namespace lowcomm::neon

#endif
