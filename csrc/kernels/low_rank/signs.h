#pragma once

#include <cstddef>
#include <cstdint>

namespace lowcomm {

// Random numbers of ±1, the same for the same `state` everywhere: element i by bit i mod 64 of splitmix64's number i
// div 64 (Steele, Lea, Flood; OOPSLA 2014).
template <class T>
void drawSigns(T* out, size_t n, uint64_t state) {
  uint64_t bits = 0;
  for (size_t i = 0; i < n; ++i, bits >>= 1) {
    if (i % 64 == 0) {
      uint64_t z = state += 0x9e3779b97f4a7c15u;
      z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
      z = (z ^ z >> 27) * 0x94d049bb133111ebu;
      bits = z ^ z >> 31;
    }
    out[i] = bits & 1 ? T{1} : T{-1};
  }
}

}  // namespace lowcomm
