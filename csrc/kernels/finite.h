#pragma once

#include <cstdint>

#include "kernels/dtype.h"

namespace lowcomm {

// Magnitudes that no codec takes start here, so that the range of a bucket cannot overflow.
inline constexpr float kFiniteLimit = 0x1p126f;

// The same of codecs that rotate, before they do: a rotated element is up to 32^1/2 times, a sum on the way to it up to
// 32 times as large.
inline constexpr float kRotatedLimit = 0x1p120f;
inline constexpr uint32_t kRotatedLimitBits = 0x7b800000u;

// The first element that is NaN, infinite or of magnitude `limit` or more (a power of two), -1 when there is none: what
// a codec refuses. float32, float16, bfloat16; of other types none is found.
int64_t firstNonFinite(const void* x, DType dtype, uint64_t n, float limit = kFiniteLimit);

}  // namespace lowcomm
