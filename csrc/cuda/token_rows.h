#pragma once

#include <cstdint>

#include "cuda/device.h"
#include "pipeline/subspace.h"

namespace lowcomm::cuda {

// addTokenSigns or (`normal`) addTokenNormals of pipeline/subspace.h for `count` rows at once, with the same bits:
// out[r, :] = x[r, :] + factor·(the row of ids[r]), without x where that is null. fp32 [count, width]; out may be x.
// All pointers are to memory that `place.device` can reach, until the stream has passed the call. An id outside
// 0...kMostTokens - 1 counts by its lower 31 bits. Throws CudaError where the runtime refuses the launch.
void addTokenRows(const Place& place, float* out, const float* x, const int64_t* ids, uint64_t count,
                  const TokenSigns& tokens, bool normal, float factor);

}  // namespace lowcomm::cuda
