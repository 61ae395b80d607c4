#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/tile.cuh"
#include "kernels/philox.h"

namespace lowcomm::cuda {

// The random bytes of a thread's tile: draw[c] holds lane c's, row r's in bits 8r to 8r + 7. Called by all threads of a
// warp.
//
// A Philox call serves 16 rows of a lane, that is four groups, and its word m is the draw of the m-th of them. So each
// of those four makes the call for one of its four lanes, and the 4 x 4 words are transposed between them.
__device__ inline void drawTile(uint32_t draw[4], uint64_t block, const PhiloxKey& key, const Seat& seat) {
  const uint32_t half = seat.group / 4, mine = seat.group % 4;
  const PhiloxWords out = philox((block * 2 + half) * kLanes + 4 * seat.quad + mine, key);
  uint32_t got[4];
  for (uint32_t i = 0; i < 4; ++i)
    got[i] = __shfl_xor_sync(kWholeWarp, pick(out.word, mine ^ i), 4 * i);
  for (uint32_t c = 0; c < 4; ++c)
    draw[c] = pick(got, c ^ mine);
}

}  // namespace lowcomm::cuda
