#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/tile.cuh"
#include "cuda/uncut_args.cuh"

// What encode and decode share of a warp's way over the blocks of a tensor of channels.

namespace lowcomm::cuda {

// Where the scales of a thread's rows stand, kept from block to block without a division: a warp's blocks are `stride`
// elements apart, rows 16. All places are multiples of 4, for blocks, rows and period are.
class Rows {
 public:
  __device__ Rows(uint64_t start, uint64_t stride, uint32_t period, const Seat& seat) : period_(period) {
    at_ = static_cast<uint32_t>((start + seat.element(0)) % period);
    hop_ = static_cast<uint32_t>(stride % period);
    row_ = kLanes % period;
  }

  // Of the first row's four elements; of those of the row after another.
  __device__ uint32_t first() const { return at_; }
  __device__ uint32_t below(uint32_t at) const { return wrapped(at + row_); }

  // Whether all rows have one row's scales.
  __device__ bool alike() const { return row_ == 0; }

  // To the warp's next block.
  __device__ void next() { at_ = wrapped(at_ + hop_); }

 private:
  __device__ uint32_t wrapped(uint32_t at) const { return at < period_ ? at : at - period_; }

  uint32_t period_, at_, hop_, row_;
};

// Four neighbours by one load.
template <class To>
__device__ inline void loadFour(To to[4], const To* from) {
  struct alignas(16) Whole {
    To at[4];
  };
  const Whole four = *reinterpret_cast<const Whole*>(from);
  for (uint32_t c = 0; c < 4; ++c)
    to[c] = four.at[c];
}

}  // namespace lowcomm::cuda
