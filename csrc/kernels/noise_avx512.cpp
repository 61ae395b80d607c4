// AVX-512 F, BW, DQ and VL. No STL or torch inline code here (lanes.inl says why).
#include <cstddef>
#include <cstdint>

#include "kernels/noise.h"
#include "kernels/noise_rules.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
// GCC 12 warns of its own header's _mm512_undefined_epi32.
#pragma GCC diagnostic ignored "-Wuninitialized"
#include "kernels/lanes_avx512.inl"

namespace lowcomm {
namespace {

LOWCOMM_LANES Floats squareRoot(Floats x) {
  return (Floats)_mm512_sqrt_ps((__m512)x);
}

struct SumTable {
  Floats sums;
};

LOWCOMM_LANES SumTable sumTable(const float* sums) {
  return {(Floats)_mm512_load_ps(sums)};
}

LOWCOMM_LANES Floats lookUp(const SumTable& table, Words index) {
  return (Floats)_mm512_permutexvar_ps((__m512i)index, (__m512)table.sums);
}

}  // namespace
}  // namespace lowcomm

#include "kernels/noise_vector.inl"

namespace lowcomm {
const NoiseKernels* avx512Noise() {
  return &kNoise;
}
}  // namespace lowcomm

#else

namespace lowcomm {
const NoiseKernels* avx512Noise() {
  return nullptr;
}
}  // namespace lowcomm

#endif
