#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/checks.cuh"
#include "cuda/codebook.cuh"
#include "cuda/grid.h"
#include "cuda/grid_args.cuh"
#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/rotate.cuh"
#include "cuda/tile.cuh"
#include "kernels/finite.h"
#include "kernels/grid/grid_rules.h"

// The kernel that decodes a grid codec's payload, with an `Op` that says where the values go:
//   finish(start, n, tile, poisoned, nonfinite, seat)   n values from element `start` of the run on, by all threads of
//   a
//                                                       warp; `poisoned`: the bucket of this thread decodes to NaN

namespace lowcomm::cuda {

namespace {

template <GridValue kValue>
constexpr bool kLooksUp = kValue == GridValue::levels || kValue == GridValue::gauss;

// `step` is the one sent, times form.unit.
template <GridValue kValue>
__device__ inline float valueOf(uint32_t code, float base, float step, const float* level, const GridForm& form) {
  if constexpr (kValue == GridValue::affine) return gridValue(base, step, code);
  if constexpr (kValue == GridValue::centred) return centredValue(form.centre, step, code);
  if constexpr (kValue == GridValue::levels) return levelsValue(base, step, level[code]);
  if constexpr (kValue == GridValue::gauss) return gaussValue(level[code], step, form.gain);
}

// A warp a block of 512.
template <GridValue kValue, bool kRotated, class Op>
__global__ void __launch_bounds__(kThreads)
    decodeByWarp(const __grid_constant__ GridArgs<const std::byte> grid,
                 const __grid_constant__ BookArgs<kLooksUp<kValue>> book, const __grid_constant__ Op op) {
  constexpr bool kCentred = kValue == GridValue::centred || kValue == GridValue::gauss;
  const Seat seat = Seat::ofThisThread();
  const float* level = shareBook(book, grid.bits);
  const uint32_t bits = grid.bits, top = (1u << bits) - 1;
  const uint64_t stride = uint64_t{gridDim.x} * kWarps * kBlock;
  bool taken = isPadded(grid);
  for (uint64_t start = (uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kBlock; start < grid.count;
       start += stride) {
    const uint32_t n = elementsOf(start, grid.count), codes = elementsOf(start, grid.codes);
    const uint64_t mine = start + seat.group * kSmallestBucket;  // a thread's elements are all of one bucket
    BucketMeta sent{};
    if (mine < grid.codes) sent = loadSent<kCentred>(grid, mine >> grid.bucket_log2);
    const bool poisoned = grid.nonfinite == Nonfinite::poison && isPoison<kCentred>(sent);
    taken &= poisoned || (isFinite(sent.base) && isFinite(sent.step));
    const float step = kCentred ? sent.step * grid.form.unit : sent.step;
    uint32_t field[4];
    loadFields(field, grid.words + start / 8 * bits, codes, bits, seat);
    taken &= areCodes<kRotated>(field, n, grid.bits, seat);
    Tile tile;
    for (uint32_t r = 0; r < 4; ++r) {
      for (uint32_t c = 0; c < 4; ++c)
        tile.at[r][c] = valueOf<kValue>(field[c] >> (bits * r) & top, sent.base, step, level, grid.form);
    }
    if constexpr (kRotated) unrotateTile(tile, grid.of_units, turnAt(grid, start), seat);
    op.finish(start, n, tile, poisoned, grid.nonfinite, seat);
  }
  if (!taken) *grid.refused = 1;  // all who write, write 1
}

// Enqueues the decode of a run.
template <class Op>
void decodeWith(const Place& place, const char* doing, const GridRun& run, const GridArgs<const std::byte>& grid,
                const Op& op) {
  if (run.count == 0) return;
  const DeviceScope scope(place.device, doing);
  const auto enqueue = [&](auto kernel, const auto& book) {
    launchByWarps(place, doing, kernel, grid.count, grid, book, op);
  };
  const GridFamily& family = *gridFamily(run.codec.id);
  if (family.book) {
    return enqueue(
        family.centred ? decodeByWarp<GridValue::gauss, true, Op> : decodeByWarp<GridValue::levels, false, Op>,
        levelArgs(run));
  }
  const auto kernel = [&]<bool kRotated>() {
    return family.centred ? decodeByWarp<GridValue::centred, kRotated, Op>
                          : decodeByWarp<GridValue::affine, kRotated, Op>;
  };
  enqueue(grid.rotated ? kernel.template operator()<true>() : kernel.template operator()<false>(), BookArgs<false>{});
}

// Sets the NaN by name: a device's arithmetic makes another NaN of a poisoned bucket than a CPU's.
__device__ inline void poison(Tile& tile, bool poisoned) {
  if (poisoned) tile.each([](float& value) { value = floatOf(kPoison); });
}

}  // namespace

}  // namespace lowcomm::cuda
