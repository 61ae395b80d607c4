#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/fused_args.cuh"
#include "cuda/fused_team.cuh"
#include "cuda/grid_args.cuh"
#include "cuda/grid_encode.cuh"
#include "cuda/repair.cuh"
#include "cuda/tile.cuh"
#include "kernels/finite.h"
#include "kernels/grid/grid_form.h"
#include "kernels/grid/grid_rules.h"

// The encode kernels of grid_encode.cuh on elements that are made as they are loaded, with something to do once their
// codes are known. A fused operation is an `Op`:
//   Op::Source    what EncodeArgs::x is, and teams load their tiles from
//   source(at)    the elements from number `at` of the run on
//   begins()      false where something is refused before any block is looked at
//   finish(...)   what is done with a block once it is encoded; by all threads of a warp

namespace lowcomm::cuda {

namespace {

// The values that a thread's codes decode to.
template <bool kCentred>
__device__ inline Tile valuesOf(const uint32_t (&field)[4], const BucketMeta& sent, uint32_t bits,
                                const GridForm& form) {
  const uint32_t top = (1u << bits) - 1;
  const float step = kCentred ? sent.step * form.unit : sent.step;
  Tile tile;
#pragma unroll
  for (uint32_t i = 0; i < 16; ++i) {
    const uint32_t code = field[i % 4] >> (bits * (i / 4)) & top;
    tile.at[i / 4][i % 4] = kCentred ? centredValue(form.centre, step, code) : gridValue(sent.base, step, code);
  }
  return tile;
}

// All of a team's buckets. A bucket's range says nothing of a NaN in it, which must be known before anything is
// finished where it is to be refused.
template <GridRule kRule, class Team, class Op>
__device__ inline bool encodeFused(Team& team, const EncodeArgs<typename Op::Source>& args, const Op& op,
                                   const Seat& seat) {
  bool numbers = true;
  if (!kCentred<kRule> && args.grid.nonfinite == Nonfinite::error) numbers = largestOf(team) < kFiniteLimitBits;
  const bool taken = encodeTeam<kRule, false>(
      team, args, nullptr, seat,
      [&](uint64_t start, uint32_t n, const uint32_t(&field)[4], const BucketMeta& sent, bool in_range) {
        const Tile values = valuesOf<kCentred<kRule>>(field, sent, args.grid.bits, args.grid.form);
        op.finish(start, n, values, numbers && in_range, args.grid.nonfinite, seat);
      });
  return taken && numbers;
}

template <class Op>
struct FusedArgs {
  GridArgs<std::byte> grid;
  Op op;
  uint64_t block;
  PhiloxKey key;
};

template <GridRule kRule, uint32_t kTiles, class Op>
__global__ void __launch_bounds__(kThreads) fusedByWarp(const __grid_constant__ FusedArgs<Op> fused) {
  const Seat seat = Seat::ofThisThread();
  const EncodeArgs<typename Op::Source> args{fused.grid, fused.op.source(0), fused.block, fused.key};
  const uint64_t stride = uint64_t{gridDim.x} * kWarps * kTiles * kBlock;
  zeroPadding(args.grid);
  bool taken = fused.op.begins();
  for (uint64_t start = (uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kTiles * kBlock;
       start < args.grid.count; start += stride) {
    WarpTeam<kTiles, false, typename Op::Source> team(args, start, seat);
    taken &= encodeFused<kRule>(team, args, fused.op, seat);
  }
  if (!taken) *args.grid.refused = 1;  // all who write, write 1
}

// Registers for two thread blocks on a processor, as encodeByBlock has them.
template <GridRule kRule, class Op>
__global__ void __launch_bounds__(kMostFusedWarps* kWarp, 2) fusedByBlock(const __grid_constant__ FusedArgs<Op> fused) {
  const Seat seat = Seat::ofThisThread();
  const EncodeArgs<typename Op::Source> args{fused.grid, fused.op.source(0), fused.block, fused.key};
  const uint64_t bucket = args.grid.form.bucket;
  zeroPadding(args.grid);
  bool taken = fused.op.begins();
  for (uint64_t first = blockIdx.x * bucket; first < args.grid.count; first += gridDim.x * bucket) {
    FusedTeam<typename Op::Source> team(args, first, seat);
    taken &= encodeFused<kRule>(team, args, fused.op, seat);
  }
  if (!taken) *args.grid.refused = 1;
}

// Enqueues a fused operation on a run that has elements.
template <GridRule kRule, class Op>
void fusedAs(const Place& place, const char* doing, const FusedArgs<Op>& args) {
  launchByBuckets(place, doing, args.grid, fusedByWarp<kRule, 1, Op>, fusedByWarp<kRule, 2, Op>,
                  fusedByBlock<kRule, Op>, kMostFusedWarps, args);
}

}  // namespace

}  // namespace lowcomm::cuda
