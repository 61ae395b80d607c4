#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "base/host_device.h"
#include "cuda/tile.cuh"
#include "kernels/codebook/codebook.h"
#include "kernels/grid/grid_rules.h"

namespace lowcomm::cuda {

// The rotation of kernels/codebook/codebook.h on the tiles of a warp, which hold one block: two stages of butterflies
// are between a thread's own four rows, three between threads; of units two more between its own four lanes, and two
// between threads. All of it is called by all threads of a warp.

// kRotationSigns of lane kC of the thread's four. As constants to choose from: no table is read.
template <uint32_t kC>
__device__ inline uint32_t signsOf(const Seat& seat) {
  constexpr uint32_t first = kRotationSigns[kC], second = kRotationSigns[4 + kC];
  constexpr uint32_t third = kRotationSigns[8 + kC], fourth = kRotationSigns[12 + kC];
  const uint32_t of_quad[4] = {first, second, third, fourth};
  return pick(of_quad, seat.quad) >> (4 * seat.group);
}

// `turn`: turnOf(), 0 where the blocks are not of units.
__device__ inline void changeSigns(Tile& tile, uint32_t turn, const Seat& seat) {
  const uint32_t more = turn >> (4 * seat.group);
  const uint32_t signs[4] = {signsOf<0>(seat) ^ more, signsOf<1>(seat) ^ more, signsOf<2>(seat) ^ more,
                             signsOf<3>(seat) ^ more};
#pragma unroll
  for (uint32_t r = 0; r < 4; ++r) {
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c)
      tile.at[r][c] = floatOf(floatBits(tile.at[r][c]) ^ (signs[c] << (31 - r) & 0x80000000u));
  }
}

// Sums and differences of values of threads whose numbers in the warp are `apart`, a power of two.
__device__ inline void butterfliesBetween(Tile& tile, uint32_t apart, const Seat& seat) {
  const uint32_t minus = (4 * seat.group + seat.quad) & apart ? 0x80000000u : 0;
  tile.each([&](float& x) {
    const float other = __shfl_xor_sync(kWholeWarp, x, apart);
    x = other + floatOf(floatBits(x) ^ minus);
  });
}

// The transform and its factor.
__device__ inline void transform(Tile& tile, bool units, const Seat& seat) {
  const auto butterfly = [](float& a, float& b) {
    const float sum = a + b;
    b = a - b;
    a = sum;
  };
#pragma unroll
  for (uint32_t h = 1; h < 4; h *= 2) {
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
      if (!(i / 4 & h)) butterfly(tile.at[i / 4][i % 4], tile.at[i / 4 + h][i % 4]);
    }
  }
#pragma unroll
  for (uint32_t apart = 4; apart < 32; apart *= 2)  // rows `apart` apart
    butterfliesBetween(tile, apart, seat);
  const float scale = units ? kUnitRotationScale : kRotationScale;
  tile.each([&](float& x) { x = roundedProduct(x, scale); });
  if (!units) return;
#pragma unroll
  for (uint32_t h = 1; h < 4; h *= 2) {
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
      if (!(i & h)) butterfly(tile.at[i / 4][i % 4], tile.at[i / 4][i % 4 + h]);
    }
  }
  butterfliesBetween(tile, 1, seat);
  butterfliesBetween(tile, 2, seat);
}

// False where an element's magnitude is not below that of `limit`; nothing useful is then in the tile.
__device__ inline bool rotateTile(Tile& tile, uint32_t limit, bool units, uint32_t turn, const Seat& seat) {
  bool taken = true;
  tile.each([&](float x) { taken &= (floatBits(x) & 0x7fffffffu) < limit; });
  changeSigns(tile, turn, seat);
  transform(tile, units, seat);
  return taken;
}

__device__ inline void unrotateTile(Tile& tile, bool units, uint32_t turn, const Seat& seat) {
  transform(tile, units, seat);
  changeSigns(tile, turn, seat);
}

// Where a block had fewer elements than lanes, `held`, makes the other lanes' the first one's, so that they do not
// count among a bucket's smallest and largest.
__device__ inline void fillLanes(Tile& tile, uint32_t held, const Seat& seat) {
  if (held >= kLanes) return;
  for (uint32_t r = 0; r < 4; ++r) {
    const float first = __shfl_sync(kWholeWarp, tile.at[r][0], 4 * seat.group);
    for (uint32_t c = 0; c < 4; ++c) {
      if (4 * seat.quad + c >= held) tile.at[r][c] = first;
    }
  }
}

}  // namespace lowcomm::cuda
