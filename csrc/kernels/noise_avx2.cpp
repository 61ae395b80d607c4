// AVX2. No STL or torch inline code here (lanes.inl says why).
#include <cstddef>
#include <cstdint>

#include "kernels/noise.h"
#include "kernels/noise_rules.h"

#if defined(__AVX2__)
#include "kernels/lanes_avx2.inl"

namespace lowcomm {
namespace {

LOWCOMM_LANES Floats squareRoot(Floats x) {
  return (Floats)_mm256_sqrt_ps((__m256)x);
}

// The first eight; the others have their sign from the index.
struct SumTable {
  Floats sums;
};

LOWCOMM_LANES SumTable sumTable(const float* sums) {
  return {(Floats)_mm256_load_ps(sums)};
}

LOWCOMM_LANES Floats lookUp(const SumTable& table, Words index) {
  const Words sum = (Words)_mm256_permutevar8x32_ps((__m256)table.sums, (__m256i)index);
  return (Floats)(sum ^ (index << 28 & 0x80000000u));
}

}  // namespace
}  // namespace lowcomm

#include "kernels/noise_vector.inl"

namespace lowcomm {
const NoiseKernels* avx2Noise() {
  return &kNoise;
}
}  // namespace lowcomm

#else

namespace lowcomm {
const NoiseKernels* avx2Noise() {
  return nullptr;
}
}  // namespace lowcomm

#endif
