#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/grid.h"
#include "cuda/launch.cuh"
#include "cuda/tile.cuh"
#include "cuda/topk_args.cuh"

namespace lowcomm::cuda {
namespace {

constexpr const char* kEncoding = "encode topk";

// ---- the k-th largest magnitude, exactly: a histogram of the top digits of all, then of the next digits of those that
// share the one in which it stands, and so on; the same for any data and any order of threads ----

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

// ---- which elements are sent, and where they go ----

template <class T>
__global__ void __launch_bounds__(kChunkThreads) countChunks(TopkArgs<std::byte> args, const T* x) {
  const uint32_t threshold = args.choices[kPasses - 1].digits, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (uint64_t chunk = blockIdx.x; chunk < args.chunks; chunk += gridDim.x) {
    const uint64_t first = chunk * kChunk + warp * kShare;
    const uint64_t end = first + kShare < args.parts.n ? first + kShare : args.parts.n;
    uint32_t mine = 0;
    eachFour(x, first, end, lane, kWarp, [&](float of) {
      const uint32_t magnitude = magnitudeOf(of);
      mine += packed(magnitude > threshold, magnitude == threshold);
    });
    const Sums sums = sumOfWarps(mine);
    if (lane == 0) args.shares[chunk * kChunkWarps + warp] = {sums.warp, sums.before};
    if (threadIdx.x == 0) {
      args.above[chunk] = aboveOf(sums.all);
      args.equal[chunk] = equalOf(sums.all);
    }
  }
}

// How many of a tensor's selected elements stand before a chunk: of those that equal the threshold the first `ties`
// are.
__device__ inline uint64_t selectedBefore(const TopkArgs<std::byte>& args, uint64_t chunk, uint64_t ties) {
  const uint64_t equal = args.equal_before[chunk];
  return args.above_before[chunk] + (equal < ties ? equal : ties);
}

// The header, and zeros from the places to the values.
__device__ inline void frame(const TopkArgs<std::byte>& args, uint64_t written) {
  if (blockIdx.x != 0 || threadIdx.x >= 64) return;
  if (threadIdx.x < TopkParts::kHeader) args.payload[threadIdx.x] = headerByte(args, threadIdx.x);
  const uint64_t at = TopkParts::kHeader + written + threadIdx.x;
  if (at < args.parts.values) args.payload[at] = std::byte{0};
}

// The selected elements' places to the payload and their values to the workspace, in order. A warp takes a share by
// rows of 32 elements, of which each gets its own bit in the row's word.
template <class T>
__global__ void __launch_bounds__(kChunkThreads) placeShares(TopkArgs<std::byte> args, const T* x) {
  constexpr uint32_t kRows = kShare / kWarp, kAhead = 8;
  const TopkParts& parts = args.parts;
  std::byte* places = args.payload + TopkParts::kHeader;
  // A bitmap is written by words, whose last one may reach into the padding.
  const uint64_t written = parts.listed ? parts.places : (parts.places + 3) / 4 * 4;
  frame(args, written);
  auto* list = reinterpret_cast<uint16_t*>(places + 4 * ((parts.n + kListBlock - 1) / kListBlock));
  const uint32_t threshold = args.choices[kPasses - 1].digits, lane = threadIdx.x % kWarp;
  const uint64_t ties = args.choices[kPasses - 1].left;
  for (uint64_t number = uint64_t{blockIdx.x} * kChunkWarps + threadIdx.x / kWarp; number * kShare < parts.n;
       number += uint64_t{gridDim.x} * kChunkWarps) {
    const uint64_t chunk = number / kChunkWarps, first = number * kShare;
    const Share share = args.shares[number];
    uint64_t equal = args.equal_before[chunk] + equalOf(share.before);
    uint64_t rank = args.above_before[chunk] + aboveOf(share.before) + (equal < ties ? equal : ties);
    // Mostly all of a warp's ties are selected or none: then one ballot a row is enough.
    const bool all = equal + equalOf(share.own) <= ties, some = equal < ties && !all;
    uint32_t word = 0;
    for (uint32_t batch = 0; batch < kRows; batch += kAhead) {
      float row[kAhead];
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) {
        const uint64_t e = first + (batch + i) * kWarp + lane;
        row[i] = e < parts.n ? selected(x[e]) : 0.0f;
      }
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) {
        const uint64_t e = first + (batch + i) * kWarp + lane;
        const uint32_t magnitude = magnitudeOf(row[i]);
        bool tie = magnitude == threshold && e < parts.n;
        if (some) {
          const uint32_t ballot = __ballot_sync(kWholeWarp, tie);
          tie = tie && equal + countBefore(ballot) < ties;
          equal += static_cast<uint32_t>(__popc(ballot));
        } else {
          tie = tie && all;
        }
        const bool taken = tie || magnitude > threshold;
        const uint32_t ballot = __ballot_sync(kWholeWarp, taken);
        // More than k only where the elements change meanwhile.
        if (const uint64_t at = rank + countBefore(ballot); taken && at < parts.k) {
          args.values[at] = row[i];
          if (parts.listed) list[at] = static_cast<uint16_t>(e % kListBlock);
        }
        rank += static_cast<uint32_t>(__popc(ballot));
        if (lane == batch + i) word = ballot;
      }
    }
    if (!parts.listed) {
      const uint64_t at = first / kWarp + lane;
      if (at * 4 < written) reinterpret_cast<uint32_t*>(places)[at] = word;
    } else if (lane == 0 && first % kListBlock == 0) {
      const uint64_t next = chunk + kChunksAListBlock < args.chunks ? chunk + kChunksAListBlock : args.chunks;
      reinterpret_cast<uint32_t*>(places)[first / kListBlock] =
          static_cast<uint32_t>(selectedBefore(args, next, ties) - selectedBefore(args, chunk, ties));
    }
  }
}

// Leaves the selected values in the workspace.
template <class T>
void enqueueSelect(const Place& place, const TopkArgs<std::byte>& args, const T* x) {
  const unsigned most = gridOf(args.chunks, place.device, kEncoding);
  // Fewer, so that their histograms are few next to the elements.
  const unsigned few = std::min(most, std::max(1u, gridOf(UINT64_MAX, place.device, kEncoding) / 8));
  check(cudaMemsetAsync(args.counts, 0, kPasses * kDigits * sizeof(*args.counts), place.stream), kEncoding,
        place.device);
  for (uint32_t pass = 0; pass < kPasses; ++pass) {
    launch(place, kEncoding, countDigits<T>, few, kChunkThreads, args, x, pass);
    launch(place, kEncoding, chooseDigit, 1, kChunkThreads, args, pass);
  }
  launch(place, kEncoding, countChunks<T>, most, kChunkThreads, args, x);
  launch(place, kEncoding, sumBefore, 2, kChunkThreads, args.above, args.above_before, args.equal, args.equal_before,
         args.chunks);
  launch(place, kEncoding, placeShares<T>, most, kChunkThreads, args, x);
}

}  // namespace

size_t topkWorkspaceBytes(const GridRun& run) {
  auto args = topkArgs<std::byte>("workspace of topk", run, nullptr, nullptr, nullptr);
  return run.count == 0 ? 0 : layOut(args, nullptr);
}

void encodeTopk(const Place& place, const GridRun& run, void* payload, const void* x, const PhiloxKey& key,
                void* workspace, uint32_t* refused) {
  const auto args = topkArgs(kEncoding, run, static_cast<std::byte*>(payload), workspace, refused);
  if (run.count == 0) return;
  const DeviceScope scope(place.device, kEncoding);
  withElements(run.dtype, x, [&](const auto* x) { enqueueSelect(place, args, x); });
  encodeGrid(place, valuesRun(run, args), args.payload + args.parts.values, args.values, 0, key, refused);
}

}  // namespace lowcomm::cuda
