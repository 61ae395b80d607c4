#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/tile.cuh"
#include "kernels/grid/grid_rules.h"

namespace lowcomm::cuda {

constexpr uint32_t kMagnitude = 0x7fffffffu;

// The number that nonfinite=saturate sends for x: 0 for a NaN, for magnitudes from `limit` on the largest that is
// taken, both given by their bits, with x's sign.
__device__ inline float mended(float x, uint32_t taken, uint32_t limit) {
  const uint32_t bits = floatBits(x), magnitude = bits & kMagnitude;
  if (magnitude > 0x7f800000u) return 0;
  return magnitude >= limit ? floatOf((bits & ~kMagnitude) | taken) : x;
}

// The repair of a bucket with elements that no codec takes, under nonfinite=saturate and nonfinite=poison, as in
// codec/nonfinite.h: on the elements in registers, so the input is still read once.
struct Repair {
  uint32_t limit;      // bits of the least magnitude that the codec does not take
  uint32_t all = 0;    // bits of the largest magnitude: NaN is above infinity, infinity above all numbers
  uint32_t taken = 0;  // of those that the codec takes

  __device__ void take(uint32_t another, uint32_t another_taken) {
    all = another > all ? another : all;
    taken = another_taken > taken ? another_taken : taken;
  }
  __device__ void take(const Tile& tile) {
    tile.each([&](float x) {
      const uint32_t magnitude = floatBits(x) & kMagnitude;
      take(magnitude, magnitude < limit ? magnitude : 0);
    });
  }

  __device__ bool needed() const { return all >= limit; }

  // `blank` (poison): 0 for all.
  __device__ void mend(Tile& tile, bool blank) const {
    tile.each([&](float& x) { x = blank ? 0.0f : mended(x, taken, limit); });
  }
};

}  // namespace lowcomm::cuda
