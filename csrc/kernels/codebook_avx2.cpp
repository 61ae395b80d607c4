// The loops of codebooks and the rotation on AVX2. No STL or torch inline code here (grid_vector.inl says why).
#include "kernels/codebook.h"

#include <cstddef>
#include <cstdint>

#include "kernels/finite.h"
#include "kernels/grid_scale.h"
#include "kernels/rotate.h"
#include "kernels/table.h"

#if defined(__AVX2__) && defined(__F16C__)

#include "kernels/lanes_avx2.inl"
//
#include "kernels/grid_vector.inl"

#include "kernels/rotate.inl"

namespace lowcomm {

constexpr CodebookLoops kAvx2Codebooks = LOWCOMM_CODEBOOK_LOOPS;
constexpr RotationLoops kAvx2Rotation = LOWCOMM_ROTATION_LOOPS;

}  // namespace lowcomm

#endif
