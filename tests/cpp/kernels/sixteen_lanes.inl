// AVX-512's 16 lanes on a machine without it: plain vector operations, which the compiler cuts into the registers there
// are. Included where lanes_<isa>.inl would be, before the loops; what AVX-512 adds to this stands in lanes_avx512.inl.
#include <cstddef>
#include <cstdint>

#include "base/narrow_float.h"

namespace lowcomm {
namespace {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));
typedef uint64_t Quads __attribute__((vector_size(kLanes * 4)));

}  // namespace
}  // namespace lowcomm

#include "kernels/isa/lanes_plain.inl"

namespace lowcomm {
namespace {

LOWCOMM_LANES Quads multiplyEven(Quads a, Quads b) {
  return (a & 0xffffffffu) * (b & 0xffffffffu);
}

LOWCOMM_LANES Words evenOdd(Quads even, Quads odd) {
  return (Words)((even & 0xffffffffu) | odd << 32);
}

LOWCOMM_LANES Floats floatsOfHalves(const void* p) {
  uint16_t from[kLanes];
  __builtin_memcpy(from, p, sizeof(from));
  Floats v{};
  for (int i = 0; i < kLanes; ++i)
    v[i] = float16ToFloat(from[i]);
  return v;
}

LOWCOMM_LANES void storeAsHalves(void* p, Floats v) {
  uint16_t to[kLanes];
  for (int i = 0; i < kLanes; ++i)
    to[i] = floatToFloat16(v[i]);
  __builtin_memcpy(p, to, sizeof(to));
}

}  // namespace
}  // namespace lowcomm
