// The calls of grid.h, and the kernel that decodes; those that encode are in grid_encode.cuh.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/codebook.cuh"
#include "cuda/grid.h"
#include "cuda/grid_args.cuh"
#include "cuda/grid_check.cuh"
#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/rotate.cuh"
#include "cuda/tile.cuh"
#include "kernels/finite.h"
#include "kernels/grid/grid_rules.h"

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

// y[i] = the decoded value, or y[i] += that: a warp a block of 512.
template <bool kAdd, GridValue kValue, bool kRotated, class T>
__global__ void __launch_bounds__(kThreads)
    decodeByWarp(const __grid_constant__ GridArgs<const std::byte> grid,
                 const __grid_constant__ BookArgs<kLooksUp<kValue>> book, T* y) {
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
    taken &= areCodes<kRotated>(field, n, grid, seat);
    Tile sum, tile;
    if (kAdd) sum = loadTile(y + start, n, kZeros, seat);
    for (uint32_t r = 0; r < 4; ++r) {
      for (uint32_t c = 0; c < 4; ++c)
        tile.at[r][c] = valueOf<kValue>(field[c] >> (bits * r) & top, sent.base, step, level, grid.form);
    }
    if constexpr (kRotated) unrotateTile(tile, seat);
    if (kAdd) {
      for (uint32_t i = 0; i < 16; ++i)
        tile.at[i / 4][i % 4] = sum.at[i / 4][i % 4] + tile.at[i / 4][i % 4];
    }
    // By name: the NaN that a device's arithmetic makes of it is another one than a CPU's.
    if (poisoned) tile.each([](float& value) { value = floatOf(kPoison); });
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
  const auto enqueue = [&](auto kernel, const auto& book) {
    launchByWarps(place, doing, kernel, grid.count, grid, book, y);
  };
  const GridFamily& family = *gridFamily(run.codec.id);
  if (family.book) {
    return enqueue(family.centred ? decodeByWarp<kAdd, GridValue::gauss, true, T>
                                  : decodeByWarp<kAdd, GridValue::levels, false, T>,
                   levelArgs(run));
  }
  const auto kernel = [&]<bool kRotated>() {
    return family.centred ? decodeByWarp<kAdd, GridValue::centred, kRotated, T>
                          : decodeByWarp<kAdd, GridValue::affine, kRotated, T>;
  };
  enqueue(grid.rotated ? kernel.template operator()<true>() : kernel.template operator()<false>(), BookArgs<false>{});
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
