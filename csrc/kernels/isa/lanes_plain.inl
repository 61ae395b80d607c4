// The functions that lanes_<isa>.inl must offer, in plain vector operations and loops over the lanes: for an
// instruction set that has no instruction for it, and for tests at a width that this machine has not. The including
// file has defined kLanes, Floats, Words, Integers and Quads.
#include <cstddef>
#include <cstdint>

namespace lowcomm {
namespace {

#define LOWCOMM_LANES static inline __attribute__((always_inline, unused))

// kLanes elements of 16 bits, zero-extended.
LOWCOMM_LANES Words loadHalves(const void* p) {
  uint16_t from[kLanes];
  __builtin_memcpy(from, p, sizeof(from));
  Words v{};
  for (int i = 0; i < kLanes; ++i)
    v[i] = from[i];
  return v;
}

// The low 16 bits of values that fit them.
LOWCOMM_LANES void storeHalves(void* p, Words v) {
  uint16_t to[kLanes];
  for (int i = 0; i < kLanes; ++i)
    to[i] = static_cast<uint16_t>(v[i]);
  __builtin_memcpy(p, to, sizeof(to));
}

// A bit a lane: whether it is all ones, not 0.
LOWCOMM_LANES uint32_t maskOf(Words v) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i)
    mask |= (v[i] & 1u) << i;
  return mask;
}

// The lanes of `mask`, ascending, to p; past them up to kLanes floats are overwritten.
LOWCOMM_LANES void storeSelected(void* p, Floats v, uint32_t mask) {
  char* to = static_cast<char*>(p);
  for (int i = 0; i < kLanes; ++i) {
    const float x = v[i];
    __builtin_memcpy(to, &x, sizeof(x));
    to += (mask >> i & 1u) * sizeof(x);
  }
}

// table[index], for each lane.
LOWCOMM_LANES Words gather(const uint32_t* table, Words index) {
  Words v{};
  for (int i = 0; i < kLanes; ++i)
    v[i] = table[index[i]];
  return v;
}

// table[index], for each lane, from a table of 2^kBits floats.
template <int kBits>
LOWCOMM_LANES Floats lookUp(const float* table, Words index) {
  Floats v{};
  for (int i = 0; i < kLanes; ++i)
    v[i] = table[index[i] & ((1u << kBits) - 1)];
  return v;
}

}  // namespace
}  // namespace lowcomm
