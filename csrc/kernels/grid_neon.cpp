// NEON, which every aarch64 has. No STL or torch inline code here (grid_vector.inl says why).
#include <cstddef>
#include <cstdint>

#include "kernels/finite.h"
#include "kernels/grid_scale.h"
#include "kernels/table.h"

// The loops take memory as little-endian words.
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include <arm_neon.h>

namespace lowcomm {
namespace {

constexpr int kLanes = 4;
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));
typedef uint64_t Quads __attribute__((vector_size(kLanes * 4)));

inline __attribute__((always_inline)) Quads multiplyEven(Quads a, Quads b) {
  return (Quads)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
}

inline __attribute__((always_inline)) Words evenOdd(Quads even, Quads odd) {
  return (Words)vtrn1q_u32((uint32x4_t)even, (uint32x4_t)odd);
}

}  // namespace
}  // namespace lowcomm

#include "kernels/grid_vector.inl"

namespace lowcomm {
namespace {

// The conversions of float16 are those of x86: to nearest even, NaN made quiet, subnormals kept, while FPCR holds its
// defaults (float_env.h), of which AHP = 0 is the IEEE format.
void halfToFloat(float* y, const uint16_t* x, size_t count) {
  size_t i = 0;
  for (; i + 4 <= count; i += 4)
    vst1q_f32(y + i, vcvt_f32_f16((float16x4_t)vld1_u16(x + i)));
  for (; i < count; ++i)
    y[i] = vgetq_lane_f32(vcvt_f32_f16((float16x4_t)vdup_n_u16(x[i])), 0);
}

void floatToHalf(uint16_t* y, const float* x, size_t count) {
  size_t i = 0;
  for (; i + 4 <= count; i += 4)
    vst1_u16(y + i, (uint16x4_t)vcvt_f16_f32(vld1q_f32(x + i)));
  for (; i < count; ++i)
    y[i] = vget_lane_u16((uint16x4_t)vcvt_f16_f32(vdupq_n_f32(x[i])), 0);
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

constexpr KernelTable kTable = {"neon", LOWCOMM_GRID_LOOPS, halfToFloat, floatToHalf, brainToFloat, floatToBrain};

}  // namespace

const KernelTable* neonKernels() {
  return &kTable;
}

}  // namespace lowcomm

#else

namespace lowcomm {
const KernelTable* neonKernels() {
  return nullptr;
}
}  // namespace lowcomm

#endif
