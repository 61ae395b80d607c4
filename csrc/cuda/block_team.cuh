#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/grid_args.cuh"
#include "cuda/rotate.cuh"
#include "cuda/tile.cuh"

namespace lowcomm::cuda {

constexpr uint32_t kMostWarps = 16;  // of a thread block that works on one bucket

// take(another thread's) for every word that a thread of the thread block, of up to kMost warps, brings.
template <uint32_t kMost, class V, class F>
__device__ inline void shareInBlock(const V& mine, F&& take, const Seat& seat) {
  __shared__ decltype(mine()) of_warp[kMost];
  for (uint32_t d = 1; d < kWarp; d *= 2)
    take(__shfl_xor_sync(kWholeWarp, mine(), d));
  if (seat.thread == 0) of_warp[threadIdx.x / kWarp] = mine();
  __syncthreads();
  for (uint32_t w = 0; w < blockDim.x / kWarp; ++w)
    take(of_warp[w]);
  __syncthreads();  // the next one's writes come after everybody has read this one's
}

// The sum of the partial sums that the first 64 threads of a thread block have, in the order of FORMAT.md, "Sums". For
// all threads; a caller has a barrier between two calls.
__device__ inline float sumInBlock(float partial, const Seat& seat) {
  __shared__ float partials[64];
  if (threadIdx.x < 64) partials[threadIdx.x] = partial;
  __syncthreads();
  float sum = partials[seat.thread] + partials[seat.thread + 32];
  for (uint32_t half = 16; half > 0; half /= 2)
    sum += __shfl_xor_sync(kWholeWarp, sum, half);
  return sum;
}

// A thread block that works on one bucket of more than 1024 elements, its warps on its blocks by turns: each pass but
// the first finds the bucket in a cache. Has what WarpTeam has, called by all threads of the thread block.
template <bool kRotated, class T>
class BlockTeam {
 public:
  __device__ BlockTeam(const EncodeArgs<T>& args, uint64_t first, const Seat& seat)
      : grid_(args.grid), x_(args.x), first_(first), bucket_(args.grid.form.bucket), seat_(seat) {
    end_ = grid_.codes - first < bucket_ ? grid_.codes : first + bucket_;
  }

  __device__ uint64_t first() const { return first_; }
  __device__ bool isFirstThread() const { return threadIdx.x == 0; }

  template <class F>
  __device__ void each(F&& f) {
    for (uint64_t at = first_ + warp() * kBlock; at < end_; at += warps() * kBlock) {
      Tile tile = load(at);
      f(tile, at, elementsOf(at, end_));
    }
  }

  // From now on `each` and `sum` see zeros.
  __device__ void blank() { blank_ = true; }

  // From now on `each` and `sum` see the rotated elements. Each pass rotates them again: they are not stored. `fill`:
  // fillLanes.
  __device__ void rotate(bool fill) {
    rotated_ = true;
    fill_ = fill;
  }

  // False once a pass met an element that is to be rotated and is not one that the codec takes.
  __device__ bool taken() const { return taken_; }

  template <class V, class F>
  __device__ void share(const V& mine, F&& take) const {
    shareInBlock<kMostWarps>(mine, take, seat_);
  }

  // As many terms as the warps hold at once go through shared memory, to 64 threads with a partial sum each.
  template <class F>
  __device__ float sum(F&& term) {
    __shared__ float4 all[kMostWarps * kBlock / 4];
    float* terms = reinterpret_cast<float*>(all);
    float partial = 0;
    for (uint64_t start = first_; start < end_; start += warps() * kBlock) {
      if (const uint64_t at = start + warp() * kBlock; at < end_) {
        const Tile tile = load(at);
        const uint32_t n = elementsOf(at, end_);
        for (uint32_t r = 0; r < 4; ++r) {
          float of[4];
          for (uint32_t c = 0; c < 4; ++c)
            of[c] = seat_.element(r) + c < n ? term(tile.at[r][c]) : 0.0f;  // a 0 adds nothing
          *reinterpret_cast<float4*>(terms + warp() * kBlock + seat_.element(r)) = float4{of[0], of[1], of[2], of[3]};
        }
      }
      __syncthreads();
      const uint64_t left = end_ - start, held = warps() * kBlock;
      const uint32_t here = static_cast<uint32_t>(left < held ? left : held);
      if (threadIdx.x < 64) {
#pragma unroll 8
        for (uint32_t i = threadIdx.x; i < here; i += 64)
          partial += terms[i];
      }
      __syncthreads();
    }
    return sumInBlock(partial, seat_);
  }

 private:
  __device__ static uint32_t warp() { return threadIdx.x / kWarp; }
  __device__ static uint32_t warps() { return blockDim.x / kWarp; }

  __device__ Tile load(uint64_t at) {
    const uint32_t n = elementsOf(at, grid_.count);
    Tile tile = loadTile(x_ + at, n, kRotated ? kZeros : bucket_, seat_);
    if (blank_) tile.each([](float& x) { x = 0; });
    if (kRotated && rotated_) {
      taken_ &= rotateTile(tile, grid_.limit, grid_.of_units, turnAt(grid_, at), seat_);
      if (fill_) fillLanes(tile, n, seat_);
    }
    return tile;
  }

  const GridArgs<std::byte>& grid_;
  decltype(EncodeArgs<T>::x) x_;
  uint64_t first_, end_;
  uint32_t bucket_;
  Seat seat_;
  bool blank_ = false, rotated_ = false, fill_ = false, taken_ = true;
};

}  // namespace lowcomm::cuda
