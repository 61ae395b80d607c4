#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/tile.cuh"
#include "cuda/topk_args.cuh"

// The k-th largest magnitude, exactly: a histogram of the top digits of all, then of the next digits of those that
// share the one in which it stands, and so on. The same for any data and any order of threads.

namespace lowcomm::cuda {

namespace {

// f(element) for a thread's share of elements first...end - 1; `threads` of them, four elements at a time.
template <class T, class F>
__device__ inline void eachFour(const T* x, uint64_t first, uint64_t end, uint64_t thread, uint64_t threads, F&& f) {
  const bool aligned = isAligned(x + first, sizeof(Four<T>));
  for (uint64_t e = first + 4 * thread; e < end; e += 4 * threads) {
    if (aligned && e + 4 <= end) {
      const Four<T> four = *reinterpret_cast<const Four<T>*>(x + e);
      for (uint32_t c = 0; c < 4; ++c)
        f(selected(four.at[c]));
    } else {
      for (uint64_t i = e; i < end && i < e + 4; ++i)
        f(selected(x[i]));
    }
  }
}

// counts[d] += how many of those with the digits chosen so far have d as the next.
template <class T>
__global__ void __launch_bounds__(kChunkThreads) countDigits(TopkArgs<std::byte> args, const T* x, uint32_t pass) {
  __shared__ uint32_t counts[kDigits];
  for (uint32_t d = threadIdx.x; d < kDigits; d += kChunkThreads)
    counts[d] = 0;
  __syncthreads();
  const uint32_t shift = digitShift(pass), bits = digitBits(pass);
  const uint32_t chosen = pass == 0 ? 0 : args.choices[pass - 1].digits;
  eachFour(x, 0, args.parts.n, uint64_t{blockIdx.x} * kChunkThreads + threadIdx.x, uint64_t{gridDim.x} * kChunkThreads,
           [&](float of) {
             const uint32_t magnitude = magnitudeOf(of);
             if (magnitude >> shift >> bits == chosen) atomicAdd(&counts[magnitude >> shift & ((1u << bits) - 1)], 1u);
           });
  __syncthreads();
  for (uint32_t d = threadIdx.x; d < 1u << bits; d += kChunkThreads) {
    if (counts[d] == 0) continue;
    atomicAdd(reinterpret_cast<unsigned long long*>(args.counts + pass * kDigits + d),
              static_cast<unsigned long long>(counts[d]));
  }
}

// By one thread block, whose threads have neighbouring digits each, the first thread the largest.
__global__ void __launch_bounds__(kChunkThreads) chooseDigit(TopkArgs<std::byte> args, uint32_t pass) {
  __shared__ uint64_t sums[kChunkThreads];
  const uint32_t each = (1u << digitBits(pass)) / kChunkThreads;
  const uint64_t* top = args.counts + pass * kDigits + (1u << digitBits(pass)) - 1 - threadIdx.x * each;
  uint64_t sum = 0;
  for (uint32_t i = 0; i < each; ++i)
    sum += *(top - i);
  sums[threadIdx.x] = sum;
  __syncthreads();
  uint64_t left = pass == 0 ? args.parts.k : args.choices[pass - 1].left;
  for (uint32_t t = 0; t < threadIdx.x; ++t) {
    if (sums[t] >= left) return;  // it stands above this thread's digits
    left -= sums[t];
  }
  if (sum < left) return;
  for (; *top < left; --top)
    left -= *top;
  const uint32_t digit = static_cast<uint32_t>(top - (args.counts + pass * kDigits));
  const uint32_t chosen = pass == 0 ? 0 : args.choices[pass - 1].digits;
  args.choices[pass] = {left, chosen << digitBits(pass) | digit};
}

}  // namespace

}  // namespace lowcomm::cuda
