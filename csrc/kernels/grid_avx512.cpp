// AVX-512 F, BW, DQ and VL. No STL or torch inline code here (lanes.inl says why).
#include <cstddef>
#include <cstdint>

#include "kernels/finite.h"
#include "kernels/grid_scale.h"
#include "kernels/table.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "kernels/lanes_avx512.inl"
//
#include "kernels/grid_vector.inl"

namespace lowcomm {
namespace {

void halfToFloat(float* y, const uint16_t* x, size_t count) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16)
    _mm512_storeu_ps(y + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(x + i))));
  for (; i < count; ++i)
    y[i] = _cvtsh_ss(x[i]);
}

void floatToHalf(uint16_t* y, const float* x, size_t count) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    _mm256_storeu_si256((__m256i*)(y + i), _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
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

constexpr KernelTable kTable = {"avx512", LOWCOMM_GRID_LOOPS, halfToFloat, floatToHalf, brainToFloat, floatToBrain};

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
