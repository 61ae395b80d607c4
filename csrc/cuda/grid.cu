// The calls of grid.h; the kernel that decodes is in grid_decode.cuh, those that encode are in grid_encode.cuh.
#include "cuda/grid.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/grid_args.cuh"
#include "cuda/grid_decode.cuh"
#include "cuda/tile.cuh"

namespace lowcomm::cuda {
namespace {

// y[i] = the decoded value, or y[i] += that.
template <bool kAdd, class T>
struct DecodeOp {
  T* y;

  __device__ void finish(uint64_t start, uint32_t n, const Tile& values, bool poisoned, Nonfinite,
                         const Seat& seat) const {
    Tile tile = values;
    if (kAdd) {
      const Tile sum = loadTile(y + start, n, kZeros, seat);
      for (uint32_t i = 0; i < 16; ++i)
        tile.at[i / 4][i % 4] = sum.at[i / 4][i % 4] + tile.at[i / 4][i % 4];
    }
    poison(tile, poisoned);
    storeTile(y + start, n, tile, seat);
  }
};

template <bool kAdd, class T>
void decodeRun(const Place& place, const char* doing, const GridRun& run, const void* payload, T* y,
               uint32_t* refused) {
  const auto grid = gridArgs(doing, run, static_cast<const std::byte*>(payload), refused);
  decodeWith(place, doing, run, grid, DecodeOp<kAdd, T>{y});
}

}  // namespace

void encodeGrid(const Place& place, const GridRun& run, void* payload, const void* x, uint64_t block,
                const PhiloxKey& key, uint32_t* refused) {
  const GridArgs<std::byte> grid = gridArgs("encode grid", run, static_cast<std::byte*>(payload), refused);
  if (run.count == 0) return;
  const GridFamily& family = *gridFamily(run.codec.id);
  BookArgs<true> thresholds;
  if (family.book) thresholds = thresholdArgs(run);
  withElements(run.dtype, x, [&]<class T>(const T* x) {
    encodeRun<T>(place, {grid, x, block, key}, gridRule(family), family.book ? &thresholds : nullptr);
  });
}

void decodeGrid(const Place& place, const GridRun& run, void* y, const void* payload, uint32_t* refused) {
  withElements(run.dtype, y, [&](auto* y) { decodeRun<false>(place, "decode grid", run, payload, y, refused); });
}

void decodeAddGrid(const Place& place, const GridRun& run, float* acc, const void* payload, uint32_t* refused) {
  decodeRun<true>(place, "decode and add grid", run, payload, acc, refused);
}

}  // namespace lowcomm::cuda
