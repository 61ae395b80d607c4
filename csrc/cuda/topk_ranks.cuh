#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/tile.cuh"
#include "cuda/topk_args.cuh"

// From how many elements each chunk has to how many stand before it, and before a thread's own in it.

namespace lowcomm::cuda {

namespace {

// before[i] = counts[0] + ... + counts[i - 1], for i = 0...count: a thread block does the first pair of arrays, the
// next one, where there is one, the second. Small beside the elements, so that one thread block is enough.
__global__ void __launch_bounds__(kChunkThreads)
    sumBefore(const uint32_t* first, uint64_t* first_before, const uint32_t* second, uint64_t* second_before,
              uint64_t count) {
  __shared__ uint64_t sums[kChunkThreads];
  const uint32_t* counts = blockIdx.x == 0 ? first : second;
  uint64_t* before = blockIdx.x == 0 ? first_before : second_before;
  const uint64_t each = (count + kChunkThreads - 1) / kChunkThreads;
  const uint64_t from = threadIdx.x * each < count ? threadIdx.x * each : count;
  const uint64_t end = from + each < count ? from + each : count;
  uint64_t sum = 0;
  for (uint64_t i = from; i < end; ++i)
    sum += counts[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  uint64_t at = 0;
  for (uint32_t t = 0; t < threadIdx.x; ++t)
    at += sums[t];
  for (uint64_t i = from; i < end; ++i) {
    before[i] = at;
    at += counts[i];
  }
  if (threadIdx.x == kChunkThreads - 1) before[count] = at;
}

// The sum of `mine` over the thread's warp, over the warps before it in the thread block, and over all of that. Every
// thread of the block calls it.
struct Sums {
  uint32_t warp, before, all;
};

__device__ inline Sums sumOfWarps(uint32_t mine) {
  __shared__ uint32_t of_warp[kChunkWarps];
  for (uint32_t d = 1; d < kWarp; d *= 2)
    mine += __shfl_xor_sync(kWholeWarp, mine, d);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = mine;
  __syncthreads();
  Sums sums{mine, 0, 0};
  for (uint32_t w = 0; w < kChunkWarps; ++w) {
    if (w < threadIdx.x / kWarp) sums.before += of_warp[w];
    sums.all += of_warp[w];
  }
  __syncthreads();  // the next one's writes come after everybody has read this one's
  return sums;
}

// Of a warp's bits, those of threads before this one.
__device__ inline uint32_t countBefore(uint32_t ballot) {
  return static_cast<uint32_t>(__popc(ballot & ((1u << (threadIdx.x % kWarp)) - 1)));
}

}  // namespace

}  // namespace lowcomm::cuda
