// The loops of codebooks and the rotation on NEON. No STL or torch inline code here (grid_vector.inl says why).
#include "kernels/codebook.h"

#include <cstddef>
#include <cstdint>

#include "kernels/finite.h"
#include "kernels/grid_scale.h"
#include "kernels/rotate.h"
#include "kernels/table.h"

// The loops take memory as little-endian words.
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__

#include "kernels/lanes_neon.inl"
//
#include "kernels/grid_vector.inl"

#include "kernels/rotate.inl"

namespace lowcomm {

constexpr CodebookLoops kNeonCodebooks = LOWCOMM_CODEBOOK_LOOPS;
constexpr RotationLoops kNeonRotation = LOWCOMM_ROTATION_LOOPS;

}  // namespace lowcomm

#endif
