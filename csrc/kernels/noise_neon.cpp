// NEON. No STL or torch inline code here (lanes.inl says why).
#include <cstddef>
#include <cstdint>

#include "kernels/noise.h"
#include "kernels/noise_rules.h"

// The loops take memory as little-endian words.
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include "kernels/lanes_neon.inl"

namespace lowcomm {
namespace {

LOWCOMM_LANES Floats squareRoot(Floats x) {
  return (Floats)vsqrtq_f32((float32x4_t)x);
}

struct SumTable {
  const float* sums;
};

LOWCOMM_LANES SumTable sumTable(const float* sums) {
  return {sums};
}

LOWCOMM_LANES Floats lookUp(const SumTable& table, Words index) {
  return lookUp<4>(table.sums, index);
}

}  // namespace
}  // namespace lowcomm

#include "kernels/noise_vector.inl"

namespace lowcomm {
const NoiseKernels* neonNoise() {
  return &kNoise;
}
}  // namespace lowcomm

#else

namespace lowcomm {
const NoiseKernels* neonNoise() {
  return nullptr;
}
}  // namespace lowcomm

#endif
