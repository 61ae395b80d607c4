#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/grid.h"
#include "cuda/grid_args.cuh"
#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/tile.cuh"
#include "kernels/grid_rules.h"

namespace lowcomm::cuda {
namespace {

__device__ inline bool isFinite(float x) {
  return (floatBits(x) & 0x7f800000u) != 0x7f800000u;
}

// False where the padding after the metadata is not 0.
__device__ inline bool isPadded(const GridArgs<const std::byte>& grid) {
  return blockIdx.x != 0 || threadIdx.x >= grid.pad_words ||
         reinterpret_cast<const uint32_t*>(grid.pad)[threadIdx.x] == 0;
}

// y[i] = base + step·code, or y[i] += that: a warp a block of 512.
template <bool kAdd, class T>
__global__ void __launch_bounds__(kThreads) decodeByWarp(GridArgs<const std::byte> grid, T* y) {
  const Seat seat = Seat::ofThisThread();
  const uint32_t bits = grid.bits, top = (1u << bits) - 1;
  const uint64_t stride = uint64_t{gridDim.x} * kWarps * kBlock;
  bool taken = isPadded(grid);
  for (uint64_t start = (uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kBlock; start < grid.count;
       start += stride) {
    const uint32_t n = elementsOf(start, grid.count);
    const uint64_t mine = start + seat.group * kSmallestBucket;  // a thread's elements are all of one bucket
    float2 scale{};
    if (mine < grid.count) scale = reinterpret_cast<const float2*>(grid.meta)[mine >> grid.bucket_log2];
    taken &= isFinite(scale.x) && isFinite(scale.y);
    uint32_t field[4];
    loadFields(field, grid.words + start / 8 * bits, n, bits, seat);
    Tile tile{};
    if (kAdd) tile = loadTile(y + start, n, kBlock, seat);
    for (uint32_t r = 0; r < 4; ++r) {
      for (uint32_t c = 0; c < 4; ++c) {
        const uint32_t code = (field[c] >> (bits * r)) & top;
        // Every bit of a lane's words is some row's, so this sees all that must be 0.
        taken &= code == 0 || seat.element(r) + c < n;
        const float value = gridValue(scale.x, scale.y, code);
        tile.at[r][c] = kAdd ? tile.at[r][c] + value : value;
      }
    }
    storeTile(y + start, n, tile, seat);
  }
  if (!taken) *grid.refused = 1;  // all who write, write 1
}

template <bool kAdd, class T>
void decodeRun(const Place& place, const char* doing, const GridArgs<const std::byte>& grid, T* y) {
  const DeviceScope scope(place.device, doing);
  constexpr uint64_t kShare = uint64_t{kWarps} * kBlock;
  const unsigned blocks = gridOf((grid.count + kShare - 1) / kShare, place.device, doing);
  launch(place, doing, decodeByWarp<kAdd, T>, blocks, kThreads, grid, y);
}

}  // namespace

void decodeGrid(const Place& place, const GridRun& run, void* y, const void* payload, uint32_t* refused) {
  constexpr const char* kDoing = "decode grid";
  const auto grid = gridArgs(kDoing, run, static_cast<const std::byte*>(payload), refused);
  if (run.count == 0) return;
  switch (run.dtype) {
    case DType::float16:
      return decodeRun<false>(place, kDoing, grid, static_cast<Float16*>(y));
    case DType::bfloat16:
      return decodeRun<false>(place, kDoing, grid, static_cast<Bfloat16*>(y));
    default:
      return decodeRun<false>(place, kDoing, grid, static_cast<float*>(y));
  }
}

void decodeAddGrid(const Place& place, const GridRun& run, float* acc, const void* payload, uint32_t* refused) {
  constexpr const char* kDoing = "decode and add grid";
  const auto grid = gridArgs(kDoing, run, static_cast<const std::byte*>(payload), refused);
  if (run.count == 0) return;
  decodeRun<true>(place, kDoing, grid, acc);
}

}  // namespace lowcomm::cuda
