#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "kernels/philox.h"

namespace lowcomm::cuda {

// A warp works on one block of 512 elements, 32 rows of 16 lanes. Thread t holds rows 4·(t / 4) to 4·(t / 4) + 3 of
// lanes 4·(t % 4) to 4·(t % 4) + 3. Why so:
//  - a thread's four elements of a row are 16 bytes, and no 32-byte sector is read by two loads of a warp;
//  - the smallest bucket, 64, is four rows: no thread ever holds elements of two buckets, and a bucket's threads are
//    neighbours, so its statistics need log2(bucket / 16) shuffles;
//  - a lane's four consecutive codes are 4·b <= 32 bits, most of a word, before anything is exchanged;
//  - the 512 random bytes are one Philox call a thread.

constexpr uint32_t kWarp = 32;
constexpr uint32_t kWholeWarp = 0xffffffffu;
constexpr uint32_t kThreads = 128;  // of a thread block where warps work each for itself
constexpr uint32_t kWarps = kThreads / kWarp;
constexpr uint32_t kLanes = 16;
constexpr uint32_t kBlock = 512;
constexpr uint32_t kSmallestBucket = 64;

struct Tile {
  float at[4][4];  // [row][lane]

  // f(element), unrolled, so that all stay in registers.
  template <class F>
  __device__ void each(F&& f) {
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i)
      f(at[i / 4][i % 4]);
  }
  template <class F>
  __device__ void each(F&& f) const {
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i)
      f(at[i / 4][i % 4]);
  }
};

struct Seat {
  uint32_t thread, group, quad;  // group holds rows 4·group..., quad lanes 4·quad...

  __device__ static Seat ofThisThread() {
    const uint32_t thread = threadIdx.x % kWarp;
    return {thread, thread / 4, thread % 4};
  }

  // In the block, of the tile's row 0...3 and lane 0.
  __device__ uint32_t element(uint32_t row) const { return (4 * group + row) * kLanes + 4 * quad; }
};

// word[i] without an address: an array that is indexed at run time would leave the registers.
__device__ inline uint32_t pick(const uint32_t word[4], uint32_t i) {
  const uint32_t low = i & 1 ? word[1] : word[0], high = i & 1 ? word[3] : word[2];
  return i & 2 ? high : low;
}

__device__ inline bool isAligned(const void* at, size_t to) {
  return reinterpret_cast<uintptr_t>(at) % to == 0;
}

// The tile of the block at x, of which n elements exist, 1 or more. In the place of others stands one that does from
// the same bucket, so that statistics need not know; 0 where the whole bucket is missing, and everywhere with a bucket
// of kZeros.
constexpr uint32_t kZeros = 0;

template <class T>
__device__ inline Tile loadTile(const T* x, uint32_t n, uint32_t bucket, const Seat& seat) {
  Tile tile;
  if (n == kBlock && isAligned(x, sizeof(Four<T>))) {
    Four<T> row[4];
    for (uint32_t r = 0; r < 4; ++r)
      row[r] = *reinterpret_cast<const Four<T>*>(x + seat.element(r));
    for (uint32_t r = 0; r < 4; ++r) {
      for (uint32_t c = 0; c < 4; ++c)
        tile.at[r][c] = toFloat(row[r].at[c]);
    }
    return tile;
  }
  const uint32_t first = (seat.group * kSmallestBucket) & ~(bucket - 1);  // of the bucket, in the block
  const float other = bucket != kZeros && first < n ? toFloat(x[first]) : 0.0f;
  for (uint32_t r = 0; r < 4; ++r) {
    for (uint32_t c = 0; c < 4; ++c) {
      const uint32_t e = seat.element(r) + c;
      tile.at[r][c] = e < n ? toFloat(x[e]) : other;
    }
  }
  return tile;
}

template <class T>
__device__ inline void storeTile(T* y, uint32_t n, const Tile& tile, const Seat& seat) {
  if (n == kBlock && isAligned(y, sizeof(Four<T>))) {
    for (uint32_t r = 0; r < 4; ++r)
      storeFour(y + seat.element(r), tile.at[r]);
    return;
  }
  for (uint32_t r = 0; r < 4; ++r) {
    for (uint32_t c = 0; c < 4; ++c) {
      const uint32_t e = seat.element(r) + c;
      if (e < n) fromFloat(y[e], tile.at[r][c]);
    }
  }
}

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

// Launches a kernel whose warps take a block each, by turns.
template <class Kernel, class... Args>
void launchByWarps(const Place& place, const char* doing, Kernel* kernel, uint64_t count, Args&&... args) {
  constexpr uint64_t kShare = uint64_t{kWarps} * kBlock;
  const unsigned blocks = gridOf((count + kShare - 1) / kShare, place.device, doing);
  launch(place, doing, kernel, blocks, kThreads, std::forward<Args>(args)...);
}

}  // namespace lowcomm::cuda
