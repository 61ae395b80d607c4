#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/grid.h"
#include "cuda/launch.cuh"
#include "cuda/topk_args.cuh"
#include "kernels/finite.h"

namespace lowcomm::cuda {
namespace {

// False where the header, or the padding before the values, is another than the run gives. For one thread block.
__device__ inline bool isFramed(const TopkArgs<const std::byte>& args) {
  if (blockIdx.x != 0 || threadIdx.x >= 64) return true;
  bool taken = threadIdx.x >= TopkParts::kHeader || args.payload[threadIdx.x] == headerByte(args, threadIdx.x);
  const uint64_t at = TopkParts::kHeader + args.parts.places + threadIdx.x;
  if (at < args.parts.values) taken &= args.payload[at] == std::byte{0};
  return taken;
}

// y[e] = value, or y[e] += that. NaN by name: a device's arithmetic makes another than a CPU's.
template <bool kAdd, class T>
__device__ inline void put(T& y, float value) {
  if constexpr (kAdd) {
    y = value != value ? floatOf(kPoison) : y + value;
  } else {
    fromFloat(y, value);
  }
}

// ---- a bitmap ----

// Word `number` of the bitmap, 0 past its end.
__device__ inline uint32_t wordOf(const TopkArgs<const std::byte>& args, uint64_t number) {
  if (number * kWarp >= args.parts.n) return 0;
  return reinterpret_cast<const uint32_t*>(args.payload + TopkParts::kHeader)[number];
}

__global__ void __launch_bounds__(kChunkThreads) countBits(TopkArgs<const std::byte> args) {
  constexpr uint64_t kWords = kChunk / kWarp;  // of a chunk: one a thread
  static_assert(kWords == kChunkThreads);
  bool taken = isFramed(args);
  for (uint64_t chunk = blockIdx.x; chunk < args.chunks; chunk += gridDim.x) {
    const uint64_t number = chunk * kWords + threadIdx.x, here = args.parts.n - number * kWarp;
    const uint32_t word = wordOf(args, number);
    if (word != 0 && here < kWarp) taken &= word >> here == 0;
    const uint32_t all = sumOfWarps(static_cast<uint32_t>(__popc(word))).all;
    if (threadIdx.x == 0) args.above[chunk] = all;
  }
  if (!taken) *args.refused = 1;  // all who write, write 1
}

template <bool kAdd, class T>
__global__ void __launch_bounds__(kChunkThreads) spreadBits(TopkArgs<const std::byte> args, T* y) {
  const uint64_t n = args.parts.n, k = args.parts.k;
  if (blockIdx.x == 0 && threadIdx.x == 0 && args.above_before[args.chunks] != k) *args.refused = 1;
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint64_t chunk = blockIdx.x; chunk < args.chunks; chunk += gridDim.x) {
    const uint64_t first = chunk * kChunk + threadIdx.x / kWarp * kShare;
    const uint32_t mine = wordOf(args, first / kWarp + lane);
    uint64_t rank = args.above_before[chunk] + sumOfWarps(static_cast<uint32_t>(__popc(mine))).before;
    for (uint32_t i = 0; i < kShare / kWarp; ++i) {
      const uint32_t word = __shfl_sync(kWholeWarp, mine, i);
      const uint64_t e = first + i * kWarp + lane, at = rank + countBefore(word);
      const bool sent = (word >> lane & 1) != 0 && at < k;  // a peer's bitmap may have more
      rank += static_cast<uint32_t>(__popc(word));
      if (e < n && (sent || !kAdd)) put<kAdd>(y[e], sent ? args.values[at] : 0.0f);
    }
  }
}

// ---- a list ----

// A thread a place: its block is found among the blocks' first ranks.
template <bool kAdd, class T>
__global__ void __launch_bounds__(kChunkThreads) spreadList(TopkArgs<const std::byte> args, uint64_t blocks, T* y) {
  const uint64_t n = args.parts.n, k = args.parts.k, listed = args.above_before[blocks];
  const auto* places = reinterpret_cast<const uint16_t*>(args.payload + TopkParts::kHeader + 4 * blocks);
  bool taken = isFramed(args) && listed == k;
  const uint64_t end = listed < k ? listed : k;
  for (uint64_t i = uint64_t{blockIdx.x} * kChunkThreads + threadIdx.x; i < end; i += gridDim.x * kChunkThreads) {
    uint64_t block = 0, past = blocks;  // before[block] <= i < before[past]
    while (past - block > 1) {
      const uint64_t middle = (block + past) / 2;
      (args.above_before[middle] <= i ? block : past) = middle;
    }
    const uint64_t e = block * kListBlock + places[i];
    const bool ascends = i == args.above_before[block] || places[i - 1] < places[i];
    taken &= ascends && e < n;
    if (ascends && e < n) put<kAdd>(y[e], args.values[i]);
  }
  if (!taken) *args.refused = 1;
}

template <bool kAdd, class T>
void decodeTopkRun(const Place& place, const char* doing, const GridRun& run, const void* payload, T* y,
                   void* workspace, uint32_t* refused) {
  const auto args = topkArgs(doing, run, static_cast<const std::byte*>(payload), workspace, refused);
  if (run.count == 0) return;
  const DeviceScope scope(place.device, doing);
  decodeGrid(place, valuesRun(run, args), args.values, args.payload + args.parts.values, refused);
  if (args.parts.listed) {
    const uint64_t blocks = (run.count + kListBlock - 1) / kListBlock;
    if (!kAdd) check(cudaMemsetAsync(y, 0, run.count * sizeof(T), place.stream), doing, place.device);
    const auto* counts = reinterpret_cast<const uint32_t*>(args.payload + TopkParts::kHeader);
    launch(place, doing, sumBefore, 1, kChunkThreads, counts, args.above_before, counts, args.above_before, blocks);
    const uint64_t wanted = (args.parts.k + kChunkThreads - 1) / kChunkThreads;
    launch(place, doing, spreadList<kAdd, T>, gridOf(wanted, place.device, doing), kChunkThreads, args, blocks, y);
    return;
  }
  const unsigned grid = gridOf(args.chunks, place.device, doing);
  launch(place, doing, countBits, grid, kChunkThreads, args);
  launch(place, doing, sumBefore, 1, kChunkThreads, args.above, args.above_before, args.above, args.above_before,
         args.chunks);
  launch(place, doing, spreadBits<kAdd, T>, grid, kChunkThreads, args, y);
}

}  // namespace

void decodeTopk(const Place& place, const GridRun& run, void* y, const void* payload, void* workspace,
                uint32_t* refused) {
  withElements(run.dtype, y,
               [&](auto* y) { decodeTopkRun<false>(place, "decode topk", run, payload, y, workspace, refused); });
}

void decodeAddTopk(const Place& place, const GridRun& run, float* acc, const void* payload, void* workspace,
                   uint32_t* refused) {
  decodeTopkRun<true>(place, "decode and add topk", run, payload, acc, workspace, refused);
}

}  // namespace lowcomm::cuda
