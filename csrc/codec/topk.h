#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "codec/spec.h"

namespace lowcomm {

// The layout of a topk payload (FORMAT.md, "topk"): of a whole tensor (topk.cpp), of chunks (topk_chunks.cpp).

// Where the parts of a topk payload are. All 0 for no elements.
struct TopkParts {
  uint64_t n, k;  // elements, and how many of them are sent
  bool listed;    // places as a list, not as a bitmap
  size_t places;  // bytes of them, which follow the header
  size_t values;  // where the values begin

  static constexpr size_t kHeader = 16;  // k (8 bytes), codec and bits of the values, form of the places, 5 zeros
};

// The parts of `count` elements under `spec`, which misfit() must accept. Throws ValueError above 2^48 elements.
TopkParts topkParts(const CodecSpec& spec, uint64_t count);

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

// Which k of a chunk's n <= 65,536 elements are sent, where k = ceil(n / 2^low_bits) (FORMAT.md, "topk in chunks"), as
// Elias and Fano code a set: the places without their low bits in unary, 2 bits each, then the low bits.

constexpr size_t chunkPlacesBytes(uint64_t k, int low_bits) {
  return (2 * k + 7) / 8 + (k * static_cast<uint64_t>(low_bits) + 7) / 8;
}

// `to` and `from` have chunkPlacesBytes(k, low_bits) bytes, `from` 3 readable ones behind them; places ascend.
// readChunkPlaces throws WireError naming `codec` and the chunk's number.
void writeChunkPlaces(std::byte* to, const uint16_t* places, size_t k, int low_bits);
void readChunkPlaces(uint16_t* places, const std::byte* from, size_t k, int low_bits, size_t n,
                     const std::string& codec, uint64_t chunk);

}  // namespace lowcomm
