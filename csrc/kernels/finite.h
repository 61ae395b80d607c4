#pragma once

#include <bit>
#include <cstdint>

#include "base/dtype.h"

namespace lowcomm {

// Magnitudes that no grid codec takes start here, so that the range of a bucket cannot overflow.
inline constexpr float kFiniteLimit = 0x1p126f;
inline constexpr uint32_t kFiniteLimitBits = 0x7e800000u;

// The limit of codecs that rotate, for elements before the rotation. A rotated element is up to 512^1/2 times as large,
// and a sum on the way to it up to 32 times.
inline constexpr float kRotatedLimit = 0x1p120f;
inline constexpr uint32_t kRotatedLimitBits = 0x7b800000u;

// The NaN that a poisoned bucket has for a base, or for its step where it has no base, and decodes to.
inline constexpr uint32_t kPoison = 0x7fc00000u;

// The first element that is NaN, infinite or of magnitude `limit` or more (a power of two), which a codec refuses; -1
// if there is no such element. float32, float16, bfloat16; -1 for other types. A limit of infinity accepts all finite
// ones.
int64_t firstNonFinite(const void* x, DType dtype, uint64_t n, float limit = kFiniteLimit);

// Below 0 where x is NaN or infinite: what a loop ORs together that makes its elements anyhow. Compilers have vectors
// for it, and none for a bool that follows from comparisons of floats.
inline int32_t finiteRoom(float x) {
  return INT32_C(0x7f7fffff) - static_cast<int32_t>(std::bit_cast<uint32_t>(x) & 0x7fffffffu);
}

// Every NaN becomes kPoison.
void settleNans(float* x, uint64_t n);

}  // namespace lowcomm
