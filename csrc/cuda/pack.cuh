#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/tile.cuh"

namespace lowcomm::cuda {

// Between a thread's codes and a block's planar words (FORMAT.md, "Payload of a grid codec").
//
// A **field** is what a thread has of a lane's string: 4·b bits, row r's code at bit r·b; group g's field stands at bit
// 4·b·g of the string. The number of bits is an argument of kernels and not a template parameter: shifts by a register
// cost what others do, and eight times fewer kernels are compiled and loaded. Where codes go into words and come out of
// them, more than shifts depends on it, and the two most common widths have a branch of their own: of sm_90's
// instructions, storeFields takes about 35 in the place of 105 with 4 bits and 16 for 85 with 8, loadFields 19 and 12
// for 60.

// Words of a lane of a block with n codes.
__device__ inline uint32_t wordsALane(uint32_t n, uint32_t bits) {
  const uint32_t rows = (n + kLanes - 1) / kLanes;
  return (rows * bits + 31) / 32;
}

// The bits of the thread's field of lane 4·quad + c that belong to elements, of which the block has n. A rotated lane
// has all its rows or holds no element.
__device__ inline uint32_t presentBits(uint32_t c, uint32_t n, uint32_t bits, bool rotated, const Seat& seat) {
  const uint32_t first = (rotated ? 4 * seat.quad : seat.element(0)) + c;
  const uint32_t rows = n <= first ? 0 : rotated ? 4 : (n - first + kLanes - 1) / kLanes;
  return rows >= 4 ? 0xffffffffu >> (32 - 4 * bits) : (1u << (rows * bits)) - 1;
}

// storeFields and loadFields of kBits bits, or of any where that is 0.
template <uint32_t kBits>
__device__ inline void storeFieldsOf(std::byte* words, uint32_t field[4], uint32_t n, uint32_t any_bits,
                                     const Seat& seat) {
  const uint32_t bits = kBits > 0 ? kBits : any_bits;
  // Fields that fit a word together are joined by pairs first; the joined one is then with the lowest of its groups.
  uint32_t width = 4 * bits, span = 1;
  for (; 2 * width <= 32; width *= 2, span *= 2) {
    for (uint32_t c = 0; c < 4; ++c)
      field[c] |= __shfl_down_sync(kWholeWarp, field[c], 4 * span) << width;
  }
  // A word meets 1 field of 32 bits, 2 of 24 or 28, up to 3 of 20.
  const uint32_t reach = width == 32 ? 1 : width == 20 ? 3 : 2;
  const uint32_t first = seat.group * 32 / width;
  uint32_t word[4] = {};
  for (uint32_t i = 0; i < reach; ++i) {
    const uint32_t at = (first + i) * width;  // of the field, in the string
    const uint32_t below = seat.group * 32;
    const uint32_t source = (first + i) * span * 4 + seat.quad;  // past the last group: shifted out below
    for (uint32_t c = 0; c < 4; ++c) {
      const uint32_t part = __shfl_sync(kWholeWarp, field[c], source % kWarp);
      word[c] |= at >= below + 32 ? 0 : at >= below ? part << (at - below) : part >> (below - at);
    }
  }
  if (seat.group >= wordsALane(n, bits)) return;
  *reinterpret_cast<uint4*>(words + (seat.group * kLanes + 4 * seat.quad) * 4) =
      uint4{word[0], word[1], word[2], word[3]};
}

template <uint32_t kBits>
__device__ inline void loadFieldsOf(uint32_t field[4], const std::byte* words, uint32_t n, uint32_t any_bits,
                                    const Seat& seat) {
  const uint32_t bits = kBits > 0 ? kBits : any_bits;
  const uint32_t at = 4 * bits * seat.group, word = at / 32, shift = at % 32;
  const uint32_t present = wordsALane(n, bits);
  const auto load = [&](uint32_t w) {
    return w < present ? *reinterpret_cast<const uint4*>(words + (w * kLanes + 4 * seat.quad) * 4) : uint4{};
  };
  const uint4 low = load(word);
  const uint4 high = shift + 4 * bits > 32 ? load(word + 1) : uint4{};
  const auto join = [&](uint32_t l, uint32_t h) { return static_cast<uint32_t>(((uint64_t{h} << 32) | l) >> shift); };
  field[0] = join(low.x, high.x);
  field[1] = join(low.y, high.y);
  field[2] = join(low.z, high.z);
  field[3] = join(low.w, high.w);
}

// Writes the words of the block's n codes: thread (group g, quad q) those numbered g of lanes 4q to 4q + 3, 16 bytes in
// one store. Called by all threads of a warp.
__device__ inline void storeFields(std::byte* words, uint32_t field[4], uint32_t n, uint32_t bits, const Seat& seat) {
  if (bits == 4) return storeFieldsOf<4>(words, field, n, bits, seat);
  if (bits == 8) return storeFieldsOf<8>(words, field, n, bits, seat);
  storeFieldsOf<0>(words, field, n, bits, seat);
}

// The thread's fields of the block. Threads read what they need themselves: two wide loads, of which neighbours share
// the lines, are cheaper than an exchange.
__device__ inline void loadFields(uint32_t field[4], const std::byte* words, uint32_t n, uint32_t bits,
                                  const Seat& seat) {
  if (bits == 4) return loadFieldsOf<4>(field, words, n, bits, seat);
  if (bits == 8) return loadFieldsOf<8>(field, words, n, bits, seat);
  loadFieldsOf<0>(field, words, n, bits, seat);
}

}  // namespace lowcomm::cuda
