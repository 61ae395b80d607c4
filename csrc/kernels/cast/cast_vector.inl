// The loops of cast.cpp on the vectors of lanes.inl, compiled once an instruction set.

#include <cstddef>
#include <cstdint>

#include "kernels/cast/cast.h"
#include "kernels/isa/table.h"
//
#include "kernels/isa/lanes.inl"

namespace lowcomm {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr size_t kAhead = 8192;  // bytes prefetched ahead

LOWCOMM_INLINE Floats held(Floats x, float largest) {
  x = x < -largest ? splat(-largest) : x;
  return largest < x ? splat(largest) : x;
}

// A narrower type: kLanes of its codes, at any address, between memory and floats. `rounded` takes magnitudes up to
// `kLargest`; `put` any float, as the hardware's conversions do.
struct Half {
  static constexpr float kLargest = 65504;
  LOWCOMM_INLINE Floats get(const void* p) { return floatsOfHalves(p); }
  LOWCOMM_INLINE void rounded(void* p, Floats x) { storeAsHalves(p, x); }
  LOWCOMM_INLINE void put(void* p, Floats x) { storeAsHalves(p, x); }
};

struct Brain {
  static constexpr float kLargest = 0x1.fep127f;
  LOWCOMM_INLINE Floats get(const void* p) { return (Floats)(loadHalves(p) << 16); }
  LOWCOMM_INLINE Words nearest(Words bits) { return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16; }
  LOWCOMM_INLINE void rounded(void* p, Floats x) { storeHalves(p, nearest((Words)x)); }
  LOWCOMM_INLINE void put(void* p, Floats x) {
    const Words bits = (Words)x, quiet = bits >> 16 | 0x40u;
    storeHalves(p, x != x ? quiet : nearest(bits));
  }
};

// Elements in whole registers, then the rest through a register's worth of memory.
template <typename To, typename From, typename Step>
LOWCOMM_INLINE void eachRegister(To* y, const From* x, size_t count, Step&& step) {
  size_t i = 0;
  for (; i + 64 <= count; i += 64) {
    for (size_t line = 0; line < 64 * sizeof(From); line += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(x + i) + kAhead + line);
    for (size_t j = 0; j < 64; j += kLanes)
      step(y + i + j, x + i + j);
  }
  for (; i + kLanes <= count; i += kLanes)
    step(y + i, x + i);
  if (i == count) return;
  From from[kLanes] = {};
  To to[kLanes] = {};
  __builtin_memcpy(from, x + i, (count - i) * sizeof(From));
  __builtin_memcpy(to, y + i, (count - i) * sizeof(To));
  step(to, from);
  __builtin_memcpy(y + i, to, (count - i) * sizeof(To));
}

// The result of eachRegister's steps: the largest magnitude as an integer, above which stand infinity and NaN.
struct LargestMagnitude {
  Integers largest{};
  LOWCOMM_INLINE Integers larger(Integers a, Integers b) { return a > b ? a : b; }
  __attribute__((always_inline)) inline void see(Floats x) {
    largest = larger(largest, (Integers)((Words)x & kMagnitude));
  }
  bool finite() const {
    bool all = true;
    for (int i = 0; i < kLanes; ++i)
      all &= largest[i] < static_cast<int32_t>(kInfinity);
    return all;
  }
};

template <class Type>
bool narrow(Code16* y, const float* x, size_t count) {
  LargestMagnitude seen;
  eachRegister(y, x, count, [&](Code16* to, const float* from) {
    const Floats v = load(from);
    seen.see(v);
    Type::rounded(to, held(v, Type::kLargest));
  });
  return seen.finite();
}

template <class Type>
void convert(uint16_t* y, const float* x, size_t count) {
  eachRegister(y, x, count, [](uint16_t* to, const float* from) { Type::put(to, load(from)); });
}

template <class Type>
void expand(float* y, const uint16_t* x, size_t count) {
  eachRegister(y, x, count, [](float* to, const uint16_t* from) { store(to, Type::get(from)); });
}

template <class Type, bool kAdd>
bool widen(float* y, const Code16* x, size_t count) {
  LargestMagnitude seen;
  eachRegister(y, x, count, [&](float* to, const Code16* from) {
    const Floats v = Type::get(from);
    seen.see(v);
    store(to, kAdd ? load(to) + v : v);
  });
  return seen.finite();
}

typedef uint16_t Shorts __attribute__((vector_size(kLanes * 4)));
typedef Shorts ShortsInMemory __attribute__((aligned(1), may_alias));

bool copy(Code16* y, const Code16* x, size_t count, uint16_t infinity) {
  constexpr size_t kShorts = 2 * kLanes;
  Shorts special{};  // all ones where there was one
  size_t i = 0;
  for (; i + kShorts <= count; i += kShorts) {
    __builtin_prefetch(reinterpret_cast<const char*>(x + i) + kAhead);
    const Shorts v = *reinterpret_cast<const ShortsInMemory*>(x + i);
    special |= (Shorts)((v & infinity) == infinity);
    *reinterpret_cast<ShortsInMemory*>(y + i) = v;
  }
  bool finite = true;
  for (; i < count; ++i) {
    uint16_t code;
    __builtin_memcpy(&code, x + i, sizeof(code));
    finite &= (code & infinity) != infinity;
    y[i] = x[i];
  }
  for (size_t lane = 0; lane < kShorts; ++lane)
    finite &= special[lane] == 0;
  return finite;
}

}  // namespace
}  // namespace lowcomm

// The loops that a table points to (kernels/isa/table.h).
#define LOWCOMM_CAST_FORM(form)                                                                      \
  namespace lowcomm::form {                                                                          \
  void halvesToFloats(float* y, const uint16_t* x, size_t count) {                                   \
    expand<Half>(y, x, count);                                                                       \
  }                                                                                                  \
  void floatsToHalves(uint16_t* y, const float* x, size_t count) {                                   \
    convert<Half>(y, x, count);                                                                      \
  }                                                                                                  \
  void brainsToFloats(float* y, const uint16_t* x, size_t count) {                                   \
    expand<Brain>(y, x, count);                                                                      \
  }                                                                                                  \
  void floatsToBrains(uint16_t* y, const float* x, size_t count) {                                   \
    convert<Brain>(y, x, count);                                                                     \
  }                                                                                                  \
  constexpr CastKernels kCasts = {                                                                   \
      narrow<Half>,       narrow<Brain>, widen<Half, false>, widen<Brain, false>, widen<Half, true>, \
      widen<Brain, true>, copy};                                                                     \
  }
