#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/grid_args.cuh"
#include "cuda/rotate.cuh"
#include "cuda/tile.cuh"

namespace lowcomm::cuda {

// A warp that works on kTiles blocks at a time, which hold whole buckets (up to 512 elements: 1; 1024: 2), and reads
// them once, into registers. All of it is called by all threads of the warp; what a thread gets is its own bucket's.
// With kRotated there are no buckets of less than a block.
template <uint32_t kTiles, bool kRotated, class T>
class WarpTeam {
 public:
  __device__ WarpTeam(const EncodeArgs<T>& args, uint64_t start, const Seat& seat)
      : grid_(args.grid), start_(start), bucket_(args.grid.form.bucket), seat_(seat) {
#pragma unroll
    for (uint32_t t = 0; t < kTiles; ++t) {
      const uint64_t at = start + t * kBlock;
      if (at >= grid_.count) continue;
      tile_[t] = loadTile(args.x + at, elementsOf(at, grid_.count), kRotated ? kZeros : bucket_, seat);
    }
  }

  // The first element of the thread's bucket. Past the end of the run if the thread has no bucket.
  __device__ uint64_t first() const { return (start_ + seat_.group * kSmallestBucket) & ~uint64_t{bucket_ - 1}; }
  __device__ bool isFirstThread() const { return seat_.thread % (bucket_ / 16) == 0; }

  // f(the thread's tile, first element of its block, codes of it), block by block.
  template <class F>
  __device__ void each(F&& f) {
#pragma unroll
    for (uint32_t t = 0; t < kTiles; ++t) {
      const uint64_t at = start_ + t * kBlock;
      if (at < grid_.codes) f(tile_[t], at, elementsOf(at, grid_.codes));
    }
  }

  // Sets all elements to 0.
  __device__ void blank() {
    each([&](Tile& tile, uint64_t, uint32_t) { tile.each([](float& x) { x = 0; }); });
  }

  // Rotates the elements, after everything else that needs them as they are. `fill`: fillLanes.
  __device__ void rotate(bool fill) {
    each([&](Tile& tile, uint64_t at, uint32_t) {
      taken_ &= rotateTile(tile, grid_.limit, grid_.of_units, turnAt(grid_, at), seat_);
      if (fill) fillLanes(tile, elementsOf(at, grid_.count), seat_);
    });
  }

  // False where an element that was rotated is not one that the codec takes.
  __device__ bool taken() const { return taken_; }

  // take(another thread's) for every word that a thread of the bucket brings.
  template <class V, class F>
  __device__ void share(const V& mine, F&& take) const {
    for (uint32_t d = 1; d < bucket_ / 16 && d < kWarp; d *= 2)
      take(__shfl_xor_sync(kWholeWarp, mine(), d));
  }

  // The bucket's terms added up in the order of FORMAT.md, "Sums". term(x) is 0 or more.
  template <class F>
  __device__ float sum(F&& term) {
    __shared__ float4 all[kWarps][kBlock / kSmallestBucket * kSkewed / 4];
    float* terms = reinterpret_cast<float*>(all[threadIdx.x / kWarp]);
    if constexpr (kTiles > 1 || kRotated) return sumOf<8>(terms, term);
    switch (bucket_) {
      case 64:
        return sumOf<1>(terms, term);
      case 128:
        return sumOf<2>(terms, term);
      case 256:
        return sumOf<4>(terms, term);
      default:
        return sumOf<8>(terms, term);
    }
  }

 private:
  // Words of shared memory for 64 terms: 4 more keep the threads of different buckets in different banks.
  static constexpr uint32_t kSkewed = kSmallestBucket + 4;

  // kGroups times 64 elements of a block are one bucket's. Of its bucket's 64 partial sums, a thread has those whose
  // numbers are its own modulo its fellows' count, and adds their terms in ascending order.
  template <uint32_t kGroups, class F>
  __device__ float sumOf(float* terms, F& term) {
    constexpr uint32_t kFellows = 4 * kGroups;
    const float* mine = terms + seat_.thread / kFellows * (kGroups * kSkewed) + seat_.thread % kFellows;
    float partial[16 / kGroups] = {};
    each([&](const Tile& tile, uint64_t, uint32_t n) {
      __syncwarp();  // the last block's terms have been read
      for (uint32_t r = 0; r < 4; ++r) {
        float of[4];
        for (uint32_t c = 0; c < 4; ++c)
          of[c] = seat_.element(r) + c < n ? term(tile.at[r][c]) : 0.0f;  // a 0 adds nothing
        const uint32_t at = seat_.group * kSkewed + r * kLanes + 4 * seat_.quad;
        *reinterpret_cast<float4*>(terms + at) = float4{of[0], of[1], of[2], of[3]};
      }
      __syncwarp();
#pragma unroll
      for (uint32_t g = 0; g < kGroups; ++g) {
#pragma unroll
        for (uint32_t j = 0; j < 16 / kGroups; ++j)
          partial[j] += mine[g * kSkewed + j * kFellows];
      }
    });
#pragma unroll
    for (uint32_t half = 8 / kGroups; half > 0; half /= 2) {
#pragma unroll
      for (uint32_t j = 0; j < half; ++j)
        partial[j] += partial[j + half];
    }
    float sum = partial[0];
    for (uint32_t half = kFellows / 2; half > 0; half /= 2)
      sum += __shfl_xor_sync(kWholeWarp, sum, half);
    return sum;
  }

  Tile tile_[kTiles];  // in registers: only unrolled loops may index it
  const GridArgs<std::byte>& grid_;
  uint64_t start_;
  uint32_t bucket_;
  Seat seat_;
  bool taken_ = true;
};

}  // namespace lowcomm::cuda
