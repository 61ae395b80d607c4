// decodeDelta of fused.h: the receiver's side of encodeDelta.
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/fused.h"
#include "cuda/fused_args.cuh"
#include "cuda/fused_elements.cuh"
#include "cuda/grid_args.cuh"
#include "cuda/grid_decode.cuh"
#include "kernels/finite.h"

namespace lowcomm::cuda {
namespace {

// y = before + values, after = the same sum, held to what a memory can be.
struct DeltaOp {
  AnyElements before;
  AnyState y, after;

  __device__ void finish(uint64_t start, uint32_t n, const Tile& values, bool poisoned, Nonfinite nonfinite,
                         const Seat& seat) const {
    const Tile was = loadTile(before, start, n, kZeros, seat);
    Tile sum = values;
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i)
      sum.at[i / 4][i % 4] = was.at[i / 4][i % 4] + values.at[i / 4][i % 4];
    poison(sum, poisoned);
    storeTile(y, start, n, sum, seat);
    if (nonfinite != Nonfinite::error) {
#pragma unroll
      for (uint32_t i = 0; i < 16; ++i) {
        float& is = sum.at[i / 4][i % 4];
        is = isFinite(is) ? is : was.at[i / 4][i % 4];
      }
    }
    keepTile(after, start, n, sum, seat);
  }
};

}  // namespace

void decodeDelta(const Place& place, const GridRun& run, void* y, const void* payload, const FusedState& m,
                 uint32_t* refused) {
  constexpr const char* kDoing = "decode delta";
  const auto grid = gridArgs(kDoing, run, static_cast<const std::byte*>(payload), refused);
  expectState(kDoing, m);
  const DeltaOp op{{m.before, m.dtype}, {y, run.dtype}, {m.after, m.dtype}};
  decodeWith(place, kDoing, run, grid, op);
}

}  // namespace lowcomm::cuda
