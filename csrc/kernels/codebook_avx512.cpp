// The loops of codebooks and the rotation on AVX-512. No STL or torch inline code here (grid_vector.inl says why).
#include "kernels/codebook.h"

#include <cstddef>
#include <cstdint>

#include "kernels/finite.h"
#include "kernels/grid_scale.h"
#include "kernels/rotate.h"
#include "kernels/table.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include "kernels/lanes_avx512.inl"
//
#include "kernels/grid_vector.inl"

#include "kernels/rotate.inl"

namespace lowcomm {

constexpr CodebookLoops kAvx512Codebooks = LOWCOMM_CODEBOOK_LOOPS;
constexpr RotationLoops kAvx512Rotation = LOWCOMM_ROTATION_LOOPS;

}  // namespace lowcomm

#endif
