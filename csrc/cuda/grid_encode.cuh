#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/draws.cuh"
#include "cuda/grid.h"
#include "cuda/grid_args.cuh"
#include "cuda/grid_encode_args.cuh"
#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/tile.cuh"
#include "kernels/grid_rules.h"

// The encode kernels of one element type. A file a type instantiates them (grid_encode_<type>.cu), so that each
// compiles in seconds and beside the others.

namespace lowcomm::cuda {

namespace {

constexpr uint32_t kMostWarps = 16;  // of a thread block that works on one bucket

struct Extremes {
  float low, high;

  // fminf and fmaxf pass over a NaN, here and on a CPU: it shows in its own code (isFixed).
  __device__ void take(float l, float h) {
    low = fminf(low, l);
    high = fmaxf(high, h);
  }
  __device__ void take(const Tile& tile) {
    for (const auto& row : tile.at) {
      for (float x : row)
        take(x, x);
    }
  }
  // Of the `threads` neighbouring threads that share a bucket, a power of two.
  __device__ void share(uint32_t threads) {
    for (uint32_t d = 1; d < threads && d < kWarp; d *= 2)
      take(__shfl_xor_sync(kWholeWarp, low, d), __shfl_xor_sync(kWholeWarp, high, d));
  }
};

__device__ inline Extremes noExtremes() {
  return {floatOf(0x7f800000u), floatOf(0xff800000u)};
}

__device__ inline void storeMeta(const GridArgs<std::byte>& grid, uint64_t bucket, const GridScale& scale) {
  *reinterpret_cast<float2*>(grid.meta + 8 * bucket) = float2{scale.base, scale.step};
}

__device__ inline void zeroPadding(const GridArgs<std::byte>& grid) {
  if (blockIdx.x == 0 && threadIdx.x < grid.pad_words) reinterpret_cast<uint32_t*>(grid.pad)[threadIdx.x] = 0;
}

// Quantizes and writes one block; false where an element has no place on the grid.
template <bool kStochastic, class T>
__device__ inline bool encodeTile(const EncodeArgs<T>& args, uint64_t start, uint32_t n, const Tile& tile,
                                  const GridScale& scale, const Seat& seat) {
  const uint32_t bits = args.grid.bits, top = (1u << bits) - 1;
  uint32_t draw[4] = {};
  if (kStochastic) drawTile(draw, args.block + start / kBlock, args.key, seat);
  uint32_t field[4] = {}, strays = 0;
  for (uint32_t r = 0; r < 4; ++r) {
    for (uint32_t c = 0; c < 4; ++c) {
      uint32_t fixed =
          gridFixed(tile.at[r][c], scale.base, scale.inverse, kStochastic ? kStochasticMagic : kNearestMagic);
      strays |= fixed ^ kFixedExponent;  // one operation an element: the upper 9 bits stay 0 while all are in range
      if (kStochastic) fixed = withDraw(fixed, (draw[c] >> (8 * r)) & 255);
      const uint32_t code = seat.element(r) + c < n ? gridCode(fixed, top) : 0;
      field[c] |= code << (bits * r);
    }
  }
  storeFields(args.grid.words + start / 8 * bits, field, n, bits, seat);
  return isFixed(strays ^ kFixedExponent);
}

// A warp takes kTiles blocks at a time, which hold whole buckets (up to 512 elements: 1; 1024: 2), and reads them once,
// into registers.
template <bool kStochastic, uint32_t kTiles, class T>
__global__ void __launch_bounds__(kThreads) encodeByWarp(EncodeArgs<T> args) {
  const GridArgs<std::byte>& grid = args.grid;
  const Seat seat = Seat::ofThisThread();
  const uint64_t stride = uint64_t{gridDim.x} * kWarps * kTiles * kBlock;
  zeroPadding(grid);
  bool taken = true;
  for (uint64_t start = (uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kTiles * kBlock; start < grid.count;
       start += stride) {
    Tile tile[kTiles];  // in registers: only unrolled loops may index it
#pragma unroll
    for (uint32_t t = 0; t < kTiles; ++t) {
      const uint64_t at = start + t * kBlock;
      if (at < grid.count) tile[t] = loadTile(args.x + at, elementsOf(at, grid.count), grid.bucket, seat);
    }
    Extremes extremes = noExtremes();
#pragma unroll
    for (uint32_t t = 0; t < kTiles; ++t) {
      if (start + t * kBlock < grid.count) extremes.take(tile[t]);
    }
    extremes.share(grid.bucket / 16);
    const GridScale scale = gridScale(extremes.low, extremes.high, static_cast<float>((1u << grid.bits) - 1));
    taken &= scale.finite;
    const uint64_t mine = start + seat.group * kSmallestBucket;  // the first element of this group of threads
    if (seat.quad == 0 && mine < grid.count && mine % grid.bucket == 0) {
      storeMeta(grid, mine >> grid.bucket_log2, scale);
    }
#pragma unroll
    for (uint32_t t = 0; t < kTiles; ++t) {
      const uint64_t at = start + t * kBlock;
      if (at < grid.count) {
        taken &= encodeTile<kStochastic>(args, at, elementsOf(at, grid.count), tile[t], scale, seat);
      }
    }
  }
  if (!taken) *grid.refused = 1;  // all who write, write 1
}

// Larger buckets, a thread block each: the second pass finds the bucket in the cache.
template <bool kStochastic, class T>
__global__ void __launch_bounds__(kMostWarps* kWarp) encodeByBlock(EncodeArgs<T> args) {
  __shared__ Extremes of_warp[kMostWarps];
  const GridArgs<std::byte>& grid = args.grid;
  const Seat seat = Seat::ofThisThread();
  const uint32_t warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  zeroPadding(grid);
  bool taken = true;
  for (uint64_t bucket = blockIdx.x; bucket * grid.bucket < grid.count; bucket += gridDim.x) {
    const uint64_t begin = bucket * grid.bucket + warp * kBlock;
    const uint64_t end = grid.count - bucket * grid.bucket < grid.bucket ? grid.count : (bucket + 1) * grid.bucket;
    Extremes extremes = noExtremes();
    for (uint64_t at = begin; at < end; at += warps * kBlock)
      extremes.take(loadTile(args.x + at, elementsOf(at, end), grid.bucket, seat));
    extremes.share(kWarp);
    if (seat.thread == 0) of_warp[warp] = extremes;
    __syncthreads();
    for (uint32_t w = 0; w < warps; ++w)
      extremes.take(of_warp[w].low, of_warp[w].high);
    __syncthreads();  // the next bucket's writes come after everybody has read this one's
    const GridScale scale = gridScale(extremes.low, extremes.high, static_cast<float>((1u << grid.bits) - 1));
    taken &= scale.finite;
    if (threadIdx.x == 0) storeMeta(grid, bucket, scale);
    for (uint64_t at = begin; at < end; at += warps * kBlock) {
      const uint32_t n = elementsOf(at, end);
      taken &= encodeTile<kStochastic>(args, at, n, loadTile(args.x + at, n, grid.bucket, seat), scale, seat);
    }
  }
  if (!taken) *grid.refused = 1;
}

template <bool kStochastic, class T>
void encodeAs(const Place& place, const EncodeArgs<T>& args) {
  constexpr const char* kDoing = "encode grid";
  const GridArgs<std::byte>& grid = args.grid;
  const DeviceScope scope(place.device, kDoing);
  if (grid.bucket > 2 * kBlock) {
    const uint64_t buckets = (grid.count + grid.bucket - 1) / grid.bucket;
    const uint32_t warps = std::min(grid.bucket / kBlock, kMostWarps);
    launch(place, kDoing, encodeByBlock<kStochastic, T>, gridOf(buckets, place.device, kDoing), warps * kWarp, args);
    return;
  }
  const uint32_t tiles = grid.bucket > kBlock ? 2 : 1;
  const uint64_t share = uint64_t{kWarps} * tiles * kBlock;
  const unsigned blocks = gridOf((grid.count + share - 1) / share, place.device, kDoing);
  launch(place, kDoing, tiles == 2 ? encodeByWarp<kStochastic, 2, T> : encodeByWarp<kStochastic, 1, T>, blocks,
         kThreads, args);
}

}  // namespace

template <class T>
void encodeRun(const Place& place, const EncodeArgs<T>& args, bool stochastic) {
  stochastic ? encodeAs<true>(place, args) : encodeAs<false>(place, args);
}

}  // namespace lowcomm::cuda
