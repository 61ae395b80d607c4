#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace lowcomm {

// Which k of n elements are sent (FORMAT.md, "topk"). In memory a bitmap: bit e mod 64 of word e div 64, the bits past
// n 0. On the wire the same bitmap in ceil(n / 8) bytes, or a list: for every block of 65,536 elements how many it has,
// then their 16-bit places in it; whichever is smaller, the bitmap where neither is.

constexpr size_t bitmapWords(uint64_t n) {
  return (n + 63) / 64;
}
bool placesListed(uint64_t n, uint64_t k);
size_t placesBytes(uint64_t n, uint64_t k);

// `to` and `from` have placesBytes(n, k) bytes; the bitmap has k bits. readPlaces throws WireError naming `codec`.
void writePlaces(std::span<std::byte> to, const uint64_t* bitmap, uint64_t n, uint64_t k);
void readPlaces(uint64_t* bitmap, std::span<const std::byte> from, uint64_t n, uint64_t k, const std::string& codec);

}  // namespace lowcomm
