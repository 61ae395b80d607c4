#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/grid_args.cuh"
#include "cuda/pack.cuh"
#include "cuda/tile.cuh"
#include "kernels/finite.h"
#include "kernels/grid/grid_rules.h"

namespace lowcomm::cuda {

// The checks of a reader (GridCodec::decode), thread by thread.

__device__ inline bool isFinite(float x) {
  return (floatBits(x) & 0x7f800000u) != 0x7f800000u;
}

template <bool kCentred>
__device__ inline bool isPoison(const BucketMeta& sent) {
  return floatBits(kCentred ? sent.step : sent.base) == kPoison && (kCentred || floatBits(sent.step) == 0);
}

// False where the padding after the metadata is not 0.
__device__ inline bool isPadded(const GridArgs<const std::byte>& grid) {
  return blockIdx.x != 0 || threadIdx.x >= grid.pad_halves ||
         reinterpret_cast<const uint16_t*>(grid.pad)[threadIdx.x] == 0;
}

// Whether the fields (above which stand bits of others) hold no codes past the block's n elements. Every bit of a
// lane's words is some thread's, so this sees all that must be 0.
template <bool kRotated>
__device__ inline bool areCodes(const uint32_t field[4], uint32_t n, uint32_t bits, const Seat& seat) {
  if (n == kBlock) return true;
  uint32_t strays = 0;
  for (uint32_t c = 0; c < 4; ++c)
    strays |= field[c] & (presentBits(c, kBlock, bits, kRotated, seat) ^ presentBits(c, n, bits, kRotated, seat));
  return strays == 0;
}

}  // namespace lowcomm::cuda
