// The calls of grid.h for payloads that are not cut, and the kernels that decode; those that encode are in
// uncut_encode.cuh.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/grid.h"
#include "cuda/grid_args.cuh"
#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/repair.cuh"
#include "cuda/uncut_args.cuh"
#include "kernels/finite.h"
#include "kernels/grid/grid_rules.h"

namespace lowcomm::cuda {
namespace {

// The metadata to where the decode's warps find them, with the refusals of GridScales::expectFinite.
__global__ void __launch_bounds__(kThreads) unpackScales(UncutArgs<const std::byte> args) {
  const GridForm& form = args.form;
  const uint32_t numbers = args.centred ? 1 : 2;
  bool taken = blockIdx.x != 0 || threadIdx.x >= args.pad_bytes || args.pad[threadIdx.x] == std::byte{0};
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < args.period; i += gridDim.x * kThreads) {
    const uint64_t at = uint64_t{i % args.channels} * numbers;
    const float first = scaleAt(args.meta, at, form.bf16);
    const float step = args.centred ? first : scaleAt(args.meta, at + 1, form.bf16);
    const bool poisoned =
        args.nonfinite == Nonfinite::poison && floatBits(first) == kPoison && (args.centred || floatBits(step) == 0);
    taken &= poisoned || (isFinite(first) && isFinite(step));
    args.base[i] = first;
    args.inverse[i] = args.centred ? step * form.unit : step;
  }
  if (!taken) *args.refused = 1;  // all who write, write 1
}

__device__ inline void storeRow(float* y, const float x[4]) {
  storeFour(y, x);
}

// NaN by name, for a channel that is poisoned next to others that are not: a device's instruction makes another.
template <class T>
__device__ inline void storeRow(T* y, const float x[4]) {
  uint2 four{pairOf(T{}, x[0], x[1]), pairOf(T{}, x[2], x[3])};
  T poison;
  fromFloat(poison, floatOf(kPoison));
  const auto mend = [&](uint32_t& pair, float low, float high) {
    if (low != low) pair = (pair & 0xffff0000u) | poison.bits;
    if (high != high) pair = (pair & 0xffffu) | uint32_t{poison.bits} << 16;
  };
  mend(four.x, x[0], x[1]);
  mend(four.y, x[2], x[3]);
  __stwb(reinterpret_cast<uint2*>(y), four);
}

// y[i] = the decoded value, or y[i] += that: a warp a block of 512.
template <bool kAdd, bool kCentred, class T>
__global__ void __launch_bounds__(kThreads) decodeChannels(UncutArgs<const std::byte> args, T* y) {
  const Seat seat = Seat::ofThisThread();
  const uint32_t bits = args.bits, top = (1u << bits) - 1;
  const uint64_t stride = uint64_t{gridDim.x} * kWarps * kBlock;
  uint64_t start = (uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kBlock;
  bool taken = true;
  for (Rows rows(start, stride, args.period, seat); start < args.count; start += stride, rows.next()) {
    const uint32_t n = elementsOf(start, args.count);
    uint32_t field[4];
    loadFields(field, args.words + start / 8 * bits, n, bits, seat);
    taken &= areCodes<false>(field, n, args, seat);
    Tile tile{};
    if (kAdd) tile = loadTile(y + start, n, kBlock, seat);
    float base[4] = {}, step[4] = {};
    uint32_t at = rows.first();
    for (uint32_t r = 0; r < 4; ++r, at = rows.below(at)) {
      if (r == 0 || !rows.alike()) {
        if (!kCentred) loadFour(base, args.base + at);
        loadFour(step, args.inverse + at);
      }
      for (uint32_t c = 0; c < 4; ++c) {
        const uint32_t code = (field[c] >> (bits * r)) & top;
        const float value =
            kCentred ? centredValue(args.form.centre, step[c], code) : gridValue(base[c], step[c], code);
        // By name: the NaN that a device's arithmetic makes of poison is another one than a CPU's.
        tile.at[r][c] = value != value ? floatOf(kPoison) : kAdd ? tile.at[r][c] + value : value;
      }
    }
    if (n == kBlock && isAligned(y + start, sizeof(Four<T>))) {
      for (uint32_t r = 0; r < 4; ++r)
        storeRow(y + start + seat.element(r), tile.at[r]);
    } else {
      storeTile(y + start, n, tile, seat);
    }
  }
  if (!taken) *args.refused = 1;
}

template <bool kAdd, class T>
void decodeUncutRun(const Place& place, const char* doing, const GridRun& run, const void* payload, T* y,
                    void* workspace, uint32_t* refused) {
  const auto args = uncutArgs(doing, run, static_cast<const std::byte*>(payload), workspace, refused);
  if (run.count == 0) return;
  const DeviceScope scope(place.device, doing);
  launch(place, doing, unpackScales, (args.period + kThreads - 1) / kThreads, kThreads, args);
  launchByWarps(place, doing, args.centred ? decodeChannels<kAdd, true, T> : decodeChannels<kAdd, false, T>, args.count,
                args, y);
}

}  // namespace

size_t uncutWorkspaceBytes(const GridRun& run) {
  auto args = uncutArgs<std::byte>("workspace of an uncut grid", run, nullptr, nullptr);
  return run.count == 0 ? 0 : layOut(args, nullptr);
}

void encodeUncut(const Place& place, const GridRun& run, void* payload, const void* x, const PhiloxKey& key,
                 void* workspace, uint32_t* refused) {
  const auto args = uncutArgs("encode uncut grid", run, static_cast<std::byte*>(payload), workspace, refused);
  if (run.count == 0) return;
  const GridRule rule = gridRule(*gridFamily(run.codec.id));
  withElements(run.dtype, x, [&](const auto* x) { encodeUncutRun(place, args, x, rule, key); });
}

void decodeUncut(const Place& place, const GridRun& run, void* y, const void* payload, void* workspace,
                 uint32_t* refused) {
  withElements(run.dtype, y, [&](auto* y) {
    decodeUncutRun<false>(place, "decode uncut grid", run, payload, y, workspace, refused);
  });
}

void decodeAddUncut(const Place& place, const GridRun& run, float* acc, const void* payload, void* workspace,
                    uint32_t* refused) {
  decodeUncutRun<true>(place, "decode and add uncut grid", run, payload, acc, workspace, refused);
}

}  // namespace lowcomm::cuda
