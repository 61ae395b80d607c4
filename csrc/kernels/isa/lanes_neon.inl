// NEON, which every aarch64 has: what lanes.inl and the loops on it need of an instruction set.
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

namespace lowcomm {
namespace {

constexpr int kLanes = 4;
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));
typedef uint64_t Quads __attribute__((vector_size(kLanes * 4)));

}  // namespace
}  // namespace lowcomm

#include "kernels/isa/lanes_plain.inl"

namespace lowcomm {
namespace {

// The 64-bit products of the low halves.
LOWCOMM_LANES Quads multiplyEven(Quads a, Quads b) {
  return (Quads)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
}

// Low halves of `even` in even lanes, of `odd` in odd ones.
LOWCOMM_LANES Words evenOdd(Quads even, Quads odd) {
  return (Words)vtrn1q_u32((uint32x4_t)even, (uint32x4_t)odd);
}

// The conversions of float16 are those of x86: to nearest even, NaN made quiet, subnormals kept, while FPCR holds its
// defaults (float_env.h), of which AHP = 0 is the IEEE format.
LOWCOMM_LANES Floats floatsOfHalves(const void* p) {
  return (Floats)vcvt_f32_f16((float16x4_t)vld1_u16(static_cast<const uint16_t*>(p)));
}
LOWCOMM_LANES void storeAsHalves(void* p, Floats v) {
  vst1_u16(static_cast<uint16_t*>(p), (uint16x4_t)vcvt_f16_f32((float32x4_t)v));
}

LOWCOMM_LANES Floats squareRoot(Floats x) {
  return (Floats)vsqrtq_f32((float32x4_t)x);
}

// A table of 16 numbers.
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
