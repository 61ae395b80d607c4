#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/grid.h"
#include "cuda/grid_args.cuh"
#include "cuda/grid_check.cuh"
#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/tile.cuh"
#include "kernels/finite.h"
#include "kernels/grid_rules.h"

namespace lowcomm::cuda {
namespace {

// y[i] = the decoded value, or y[i] += that: a warp a block of 512.
template <bool kAdd, bool kCentred, class T>
__global__ void __launch_bounds__(kThreads) decodeByWarp(GridArgs<const std::byte> grid, T* y) {
  const Seat seat = Seat::ofThisThread();
  const uint32_t bits = grid.bits, top = (1u << bits) - 1;
  const uint64_t stride = uint64_t{gridDim.x} * kWarps * kBlock;
  bool taken = isPadded(grid);
  for (uint64_t start = (uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kBlock; start < grid.count;
       start += stride) {
    const uint32_t n = elementsOf(start, grid.count);
    const uint64_t mine = start + seat.group * kSmallestBucket;  // a thread's elements are all of one bucket
    Sent sent{};
    if (mine < grid.count) sent = loadSent<kCentred>(grid, mine >> grid.bucket_log2);
    const bool poisoned = grid.nonfinite == Nonfinite::poison && isPoison<kCentred>(sent);
    taken &= poisoned || (isFinite(sent.base) && isFinite(sent.step));
    const float step = kCentred ? sent.step * grid.form.unit : sent.step;
    uint32_t field[4];
    loadFields(field, grid.words + start / 8 * bits, n, bits, seat);
    taken &= areCodes(field, n, grid, seat);
    Tile tile{};
    if (kAdd) tile = loadTile(y + start, n, kBlock, seat);
    for (uint32_t r = 0; r < 4; ++r) {
      for (uint32_t c = 0; c < 4; ++c) {
        const uint32_t code = (field[c] >> (bits * r)) & top;
        const float value = kCentred ? centredValue(grid.form.centre, step, code) : gridValue(sent.base, step, code);
        tile.at[r][c] = kAdd ? tile.at[r][c] + value : value;
      }
    }
    // By name: the NaN that a device's arithmetic makes of it is another one than a CPU's.
    if (poisoned) tile.each([](float& value) { value = floatFrom(kPoison); });
    storeTile(y + start, n, tile, seat);
  }
  if (!taken) *grid.refused = 1;  // all who write, write 1
}

template <bool kAdd, class T>
void decodeRun(const Place& place, const char* doing, const GridRun& run, const void* payload, T* y,
               uint32_t* refused) {
  const auto grid = gridArgs(doing, run, static_cast<const std::byte*>(payload), refused);
  if (run.count == 0) return;
  const DeviceScope scope(place.device, doing);
  constexpr uint64_t kShare = uint64_t{kWarps} * kBlock;
  const unsigned blocks = gridOf((grid.count + kShare - 1) / kShare, place.device, doing);
  const bool centred = gridFamily(run.codec.id)->centred;
  launch(place, doing, centred ? decodeByWarp<kAdd, true, T> : decodeByWarp<kAdd, false, T>, blocks, kThreads, grid, y);
}

}  // namespace

void decodeGrid(const Place& place, const GridRun& run, void* y, const void* payload, uint32_t* refused) {
  constexpr const char* kDoing = "decode grid";
  switch (run.dtype) {
    case DType::float16:
      return decodeRun<false>(place, kDoing, run, payload, static_cast<Float16*>(y), refused);
    case DType::bfloat16:
      return decodeRun<false>(place, kDoing, run, payload, static_cast<Bfloat16*>(y), refused);
    default:
      return decodeRun<false>(place, kDoing, run, payload, static_cast<float*>(y), refused);
  }
}

void decodeAddGrid(const Place& place, const GridRun& run, float* acc, const void* payload, uint32_t* refused) {
  decodeRun<true>(place, "decode and add grid", run, payload, acc, refused);
}

}  // namespace lowcomm::cuda
