#pragma once

#include <cstdint>

#include "kernels/dtype.h"

namespace lowcomm {

// Magnitudes that no grid codec takes start here, so that the range of a bucket cannot overflow.
inline constexpr float kFiniteLimit = 0x1p126f;
inline constexpr uint32_t kFiniteLimitBits = 0x7e800000u;

// The NaN that a poisoned bucket has for a base, or for its step where it has no base, and decodes to.
inline constexpr uint32_t kPoison = 0x7fc00000u;

// The first element that is NaN, infinite or of magnitude kFiniteLimit or more, -1 when there is none: what a grid
// codec refuses. float32, float16, bfloat16; of other types none is found. `of_any_size`: NaN and infinities only.
int64_t firstNonFinite(const void* x, DType dtype, uint64_t n, bool of_any_size = false);

}  // namespace lowcomm
