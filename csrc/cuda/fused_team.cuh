#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/block_team.cuh"
#include "cuda/grid_args.cuh"
#include "cuda/repair.cuh"
#include "cuda/tile.cuh"

namespace lowcomm::cuda {

constexpr uint32_t kMostFusedWarps = 8;  // of a thread block that works on one bucket of a fused operation
constexpr uint32_t kKeptTiles = 2;       // of a warp, 2 KiB each

// Tiles in shared memory: four i of thread t of a tile is row i of the thread's elements, so that threads which read
// what they wrote meet no other's bank and no barrier.
using KeptTile = float4[4][kWarp];

__device__ inline KeptTile& keptTile(uint32_t warp, uint32_t slot) {
  __shared__ float4 kept[kMostFusedWarps][kKeptTiles][4][kWarp];
  return kept[warp][slot];
}

// Makes a tile, of which n elements exist, into a slot of the warp. It is a call, and not inlined into each pass over a
// bucket: what it needs of registers, a sum of many payloads above all, the passes then have for themselves.
template <class Source>
__device__ __noinline__ void makeTile(Source from, uint32_t n, uint32_t bucket, uint32_t slot) {
  const Tile tile = loadTile(from, n, bucket, Seat::ofThisThread());
  KeptTile& kept = keptTile(threadIdx.x / kWarp, slot);
#pragma unroll
  for (uint32_t r = 0; r < 4; ++r)
    kept[r][threadIdx.x % kWarp] = float4{tile.at[r][0], tile.at[r][1], tile.at[r][2], tile.at[r][3]};
}

// A thread block that works on one bucket of more than 1024 elements of a fused operation, its warps on its blocks by
// turns, a round of them at a time. Elements are made in the first pass and stay in shared memory: all those of buckets
// of up to 8192; of larger ones the first 4096, and the others are made anew in each pass. Has what BlockTeam has but
// for rotations; called by all threads of the thread block.
template <class Source>
class FusedTeam {
 public:
  __device__ FusedTeam(const EncodeArgs<Source>& args, uint64_t first, const Seat& seat)
      : grid_(args.grid), x_(args.x), first_(first), bucket_(args.grid.form.bucket), seat_(seat) {
    size_ = static_cast<uint32_t>(grid_.count - first < bucket_ ? grid_.count - first : bucket_);
  }

  __device__ uint64_t first() const { return first_; }
  __device__ bool isFirstThread() const { return threadIdx.x == 0; }
  __device__ bool taken() const { return true; }

  template <class F>
  __device__ void each(F&& f) {
    for (uint32_t round = 0; round * roundSize() < size_; ++round) {
      const uint32_t at = round * roundSize() + warp() * kBlock;
      if (at >= size_) return;
      const KeptTile& kept = made(round, at);
      Tile tile;
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) {
        const float4 row = kept[r][seat_.thread];
        tile.at[r][0] = row.x, tile.at[r][1] = row.y, tile.at[r][2] = row.z, tile.at[r][3] = row.w;
      }
      if (mended_) repair_.mend(tile, blank_);
      f(tile, first_ + at, elementsOf(at, size_));
    }
  }

  // From now on `each` and `sum` see the mended elements.
  __device__ void mend(const Repair& repair, bool blank) {
    repair_ = repair;
    mended_ = true;
    blank_ = blank;
  }

  template <class V, class F>
  __device__ void share(const V& mine, F&& take) const {
    shareInBlock<kMostFusedWarps>(mine, take, seat_);
  }

  // The bucket's terms added up in the order of FORMAT.md, "Sums": 64 threads have a partial sum each, of the elements
  // whose numbers are their own modulo 64. These lie in one row and one lane of all groups of all tiles.
  template <class F>
  __device__ float sum(F&& term) {
    float partial = 0;
    for (uint32_t round = 0; round * roundSize() < size_; ++round) {
      const uint32_t start = round * roundSize();
      if (const uint32_t at = start + warp() * kBlock; at < size_) made(round, at);
      __syncthreads();
      if (threadIdx.x < 64) {
        const uint32_t row = threadIdx.x / kLanes, quad = threadIdx.x % kLanes / 4, lane = threadIdx.x % 4;
        const uint32_t here = size_ - start < roundSize() ? size_ - start : roundSize();
#pragma unroll 8
        for (uint32_t i = threadIdx.x; i < here; i += 64) {
          const KeptTile& kept = keptTile(i / kBlock, slotOf(round));
          partial += term(mended(reinterpret_cast<const float*>(&kept[row][i % kBlock / 64 * 4 + quad])[lane]));
        }
      }
      __syncthreads();  // a slot's next tile is made after all have read this one
    }
    return sumInBlock(partial, seat_);
  }

 private:
  __device__ static uint32_t warp() { return threadIdx.x / kWarp; }
  __device__ static uint32_t roundSize() { return blockDim.x / kWarp * kBlock; }
  __device__ static uint32_t slotOf(uint32_t round) { return round < kKeptTiles ? round : kKeptTiles - 1; }

  __device__ float mended(float x) const {
    if (!mended_) return x;
    return blank_ ? 0.0f : cuda::mended(x, repair_.taken, repair_.limit);
  }

  // The warp's tile of a round, whose first element is number `at` of the bucket. The last slot has the latest tile
  // that did not fit another one.
  __device__ const KeptTile& made(uint32_t round, uint32_t at) {
    const uint32_t slot = slotOf(round);
    const bool last = slot == kKeptTiles - 1;
    if (last ? round != latest_ : round >= kept_) {
      makeTile(x_ + (first_ + at), elementsOf(at, size_), bucket_, slot);
      (last ? latest_ : kept_) = last ? round : round + 1;
    }
    return keptTile(warp(), slot);
  }

  const GridArgs<std::byte>& grid_;
  Source x_;
  uint64_t first_;
  uint32_t bucket_, size_;            // elements of whole buckets, and of this one
  uint32_t kept_ = 0, latest_ = ~0u;  // rounds in slots of their own, and the one that the last slot has
  Seat seat_;
  Repair repair_{grid_.limit};
  bool mended_ = false, blank_ = false;
};

}  // namespace lowcomm::cuda
