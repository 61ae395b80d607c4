#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "cuda/element.cuh"
#include "cuda/grid.h"
#include "cuda/grid_args.cuh"
#include "cuda/tile.cuh"
#include "kernels/cast/cast_rules.h"
#include "kernels/grid/grid_form.h"
#include "kernels/philox.h"

// The arguments that the calls of fused.h (fused.cu) hand to their kernels. CMake makes a file of instance.cu.in for
// each of them, so that they compile at the same time.

namespace lowcomm::cuda {

// Throws TypeError for a state of another type than its three.
void expectState(const char* doing, const FusedState& state);

enum class Change : uint8_t { delta, feedback };

// Enqueues encodeDelta or encodeFeedback of a run that has elements (fused_change.cuh).
template <Change kChange>
void encodeChange(const Place& place, const char* doing, const GridArgs<std::byte>& grid, const GridRun& run,
                  const void* x, const FusedState& state, uint64_t block, const PhiloxKey& key);

// The terms of a sum, in the memory of a kernel's parameters: too much for registers.
struct SumTerms {
  FusedTerm term[kMostTerms];
  uint32_t count, average_over;
  size_t pad, words;  // in every payload
  DType own;
};

// Enqueues the sum of a run that has elements, for grids from a bucket's minimum or for those around 0
// (fused_sum.cuh).
template <bool kCentred>
void encodeSumAs(const Place& place, const char* doing, GridRule rule, const GridArgs<std::byte>& grid,
                 const SumTerms& terms, void* out, uint64_t block, const PhiloxKey& key);

// Elements whose type is known at run time only: nine pairs of types times all rules would be too many kernels, and a
// branch that all threads take costs nothing next to the loads.
struct AnyElements {
  const void* data;
  DType dtype;
};
struct AnyState {
  void* data;
  DType dtype;
};

// As loadTile, of the block that begins with element `at`.
__device__ inline Tile loadTile(const AnyElements& x, uint64_t at, uint32_t n, uint32_t bucket, const Seat& seat) {
  if (x.dtype == DType::float32) return loadTile(static_cast<const float*>(x.data) + at, n, bucket, seat);
  if (x.dtype == DType::float16) return loadTile(static_cast<const AnyFloat16*>(x.data) + at, n, bucket, seat);
  return loadTile(static_cast<const Bfloat16*>(x.data) + at, n, bucket, seat);
}

// As storeTile, but of any mixture of numbers and NaN.
template <class T>
__device__ inline void storeMixed(T* y, uint32_t n, const Tile& tile, const Seat& seat) {
  bool nan = false;
  tile.each([&](float x) { nan |= x != x; });
  if (!nan) return storeTile(y, n, tile, seat);
  for (uint32_t r = 0; r < 4; ++r) {
    for (uint32_t c = 0; c < 4; ++c) {
      const uint32_t e = seat.element(r) + c;
      if (e < n) fromFloat(y[e], tile.at[r][c]);
    }
  }
}

// Stores elements of a state, limited to the largest number of its type; NaN, which its owner may have put there,
// stays.
template <class T>
__device__ inline void keepTile(T* y, float largest, uint32_t n, const Tile& tile, const Seat& seat) {
  Tile held = tile;
  held.each([&](float& x) { x = heldState(x, largest); });
  storeMixed(y, n, held, seat);
}

__device__ inline void keepTile(const AnyState& y, uint64_t at, uint32_t n, const Tile& tile, const Seat& seat) {
  if (y.dtype == DType::float32) return storeTile(static_cast<float*>(y.data) + at, n, tile, seat);
  if (y.dtype == DType::float16) return keepTile(static_cast<Float16*>(y.data) + at, kFloat16Largest, n, tile, seat);
  keepTile(static_cast<Bfloat16*>(y.data) + at, kBfloat16Largest, n, tile, seat);
}

__device__ inline void storeTile(const AnyState& y, uint64_t at, uint32_t n, const Tile& tile, const Seat& seat) {
  if (y.dtype == DType::float32) return storeTile(static_cast<float*>(y.data) + at, n, tile, seat);
  if (y.dtype == DType::float16) return storeMixed(static_cast<Float16*>(y.data) + at, n, tile, seat);
  return storeMixed(static_cast<Bfloat16*>(y.data) + at, n, tile, seat);
}

}  // namespace lowcomm::cuda
