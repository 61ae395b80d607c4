// AVX2 and F16C. No STL or torch inline code here (lanes.inl says why).
#include <cstddef>
#include <cstdint>

#include "kernels/finite.h"
#include "kernels/grid_scale.h"
#include "kernels/table.h"

#if defined(__AVX2__) && defined(__F16C__)
#include "kernels/lanes_avx2.inl"
//
#include "kernels/grid_vector.inl"

namespace lowcomm {
namespace {

void halfToFloat(float* y, const uint16_t* x, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + i))));
  for (; i < count; ++i)
    y[i] = _cvtsh_ss(x[i]);
}

void floatToHalf(uint16_t* y, const float* x, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm_storeu_si128((__m128i*)(y + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < count; ++i)
    y[i] = _cvtss_sh(x[i], _MM_FROUND_TO_NEAREST_INT);
}

void brainToFloat(float* y, const uint16_t* x, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = uint32_t{x[i]} << 16;
    __builtin_memcpy(y + i, &bits, 4);
  }
}

void floatToBrain(uint16_t* y, const float* x, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, x + i, 4);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    y[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
}

constexpr KernelTable kTable = {"avx2", LOWCOMM_GRID_LOOPS, halfToFloat, floatToHalf, brainToFloat, floatToBrain};

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
