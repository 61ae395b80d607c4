#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "codec/spec.h"
#include "codec/topk.h"
#include "cuda/element.cuh"
#include "cuda/grid.h"
#include "cuda/launch.cuh"
#include "cuda/tile.cuh"
#include "kernels/grid/grid_rules.h"
#include "kernels/select/select.h"

namespace lowcomm::cuda {

// A thread block takes a chunk of elements at a time, a warp a share of it.
constexpr uint32_t kChunkThreads = 256;
constexpr uint32_t kChunkWarps = kChunkThreads / 32;
constexpr uint32_t kShare = 1024;
constexpr uint64_t kChunk = kChunkWarps * kShare;
constexpr uint64_t kListBlock = 65536;  // of elements, whose places in it are 16 bits
constexpr uint64_t kChunksAListBlock = kListBlock / kChunk;

// The digits of a magnitude's 31 bits, from the top: 11, 10 and 10 bits.
constexpr uint32_t kPasses = 3;
__host__ __device__ constexpr uint32_t digitBits(uint32_t pass) {
  return pass == 0 ? 11 : 10;
}
__host__ __device__ constexpr uint32_t digitShift(uint32_t pass) {
  return 20 - 10 * pass;
}
static_assert(digitBits(0) == kDigitBits && digitShift(0) == kDigitShift && digitShift(kPasses - 1) == 0);

// The result of a pass: the digits of the k-th largest magnitude so far, and its number among those that have them.
struct Choice {
  uint64_t left;
  uint32_t digits;
};

// A number of elements above the threshold, and one of elements that equal it, both of a chunk at most: as one number,
// so that they are added up together.
__host__ __device__ constexpr uint32_t packed(bool above, bool equal) {
  return above ? 1u << 16 : equal ? 1 : 0;
}
__host__ __device__ constexpr uint32_t aboveOf(uint32_t counts) {
  return counts >> 16;
}
__host__ __device__ constexpr uint32_t equalOf(uint32_t counts) {
  return counts & 0xffffu;
}

// A warp's elements of a chunk: packed numbers of them, and of those of the chunk's warps before.
struct Share {
  uint32_t own, before;
};

// A tensor, its payload and the workspace, as kernels see them. Byte is std::byte, const where the payload is read.
template <class Byte>
struct TopkArgs {
  TopkParts parts;
  Byte* payload;
  uint8_t codec, bits;  // of the values
  uint64_t chunks;
  uint32_t* refused;

  uint64_t* counts;                       // of digits: [kPasses][2048]
  Choice* choices;                        // [kPasses]
  uint32_t *above, *equal;                // [chunks]: elements above the threshold, and equal to it
  uint64_t *above_before, *equal_before;  // [chunks + 1]: in all chunks before; the last: all
  Share* shares;                          // [chunks · kChunkWarps]
  float* values;                          // [k]
};

// Byte `at` of the header.
template <class Byte>
__device__ inline std::byte headerByte(const TopkArgs<Byte>& args, uint32_t at) {
  if (at < 8) return static_cast<std::byte>(args.parts.k >> (8 * at));
  return static_cast<std::byte>(at == 8 ? args.codec : at == 9 ? args.bits : at == 10 ? args.parts.listed : 0);
}

// An element as the float that the host selects by, and what it is selected by. The instruction for float16 would make
// one NaN of all, which have an order too.
__device__ inline float selected(float x) {
  return x;
}
__device__ inline float selected(Bfloat16 x) {
  return toFloat(x);
}
__device__ inline float selected(Float16 x) {
  return (x.bits & 0x7c00u) == 0x7c00u ? float16ToFloat(x.bits) : toFloat(x);
}
__device__ inline uint32_t magnitudeOf(float x) {
  return floatBits(x) & 0x7fffffffu;
}

template <class Byte>
size_t layOut(TopkArgs<Byte>& args, void* workspace) {
  Workspace parts(workspace);
  args.counts = parts.take<uint64_t>(kPasses * kDigits);
  args.choices = parts.take<Choice>(kPasses);
  args.above = parts.take<uint32_t>(args.chunks);
  args.equal = parts.take<uint32_t>(args.chunks);
  args.above_before = parts.take<uint64_t>(args.chunks + 1);
  args.equal_before = parts.take<uint64_t>(args.chunks + 1);
  args.shares = parts.take<Share>(args.chunks * kChunkWarps);
  args.values = parts.take<float>(args.parts.k);
  return parts.bytes();
}

// The arguments of a call. Throws for a run that no call can take.
template <class Byte>
TopkArgs<Byte> topkArgs(const char* doing, const GridRun& run, Byte* payload, void* workspace, uint32_t* refused) {
  checkRun(doing, run.codec, run.codec.id == CodecId::topk, "topk", run.dtype, payload);
  expectAligned(doing, "workspace", workspace);
  TopkArgs<Byte> args{};
  args.parts = topkParts(run.codec, run.count);
  args.payload = payload;
  args.codec = static_cast<uint8_t>(run.codec.values);
  args.bits = run.codec.value_bits;
  args.chunks = (run.count + kChunk - 1) / kChunk;
  args.refused = refused;
  layOut(args, workspace);
  return args;
}

// The values, as a run of their own.
template <class Byte>
GridRun valuesRun(const GridRun& run, const TopkArgs<Byte>& args) {
  return {valueSpec(run.codec), DType::float32, args.parts.k};
}

// ---- from how many elements each chunk has to how many stand before it, and before a thread's own in it ----

namespace {

// before[i] = counts[0] + ... + counts[i - 1], for i = 0...count: a thread block does the first pair of arrays, the
// next one, where there is one, the second. Small next to the elements, so that one thread block is enough.
__global__ void __launch_bounds__(kChunkThreads)
    sumBefore(const uint32_t* first, uint64_t* first_before, const uint32_t* second, uint64_t* second_before,
              uint64_t count) {
  __shared__ uint64_t sums[kChunkThreads];
  const uint32_t* counts = blockIdx.x == 0 ? first : second;
  uint64_t* before = blockIdx.x == 0 ? first_before : second_before;
  const uint64_t each = (count + kChunkThreads - 1) / kChunkThreads;
  const uint64_t from = threadIdx.x * each < count ? threadIdx.x * each : count;
  const uint64_t end = from + each < count ? from + each : count;
  uint64_t sum = 0;
  for (uint64_t i = from; i < end; ++i)
    sum += counts[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  uint64_t at = 0;
  for (uint32_t t = 0; t < threadIdx.x; ++t)
    at += sums[t];
  for (uint64_t i = from; i < end; ++i) {
    before[i] = at;
    at += counts[i];
  }
  if (threadIdx.x == kChunkThreads - 1) before[count] = at;
}

// The sum of `mine` over the thread's warp, over the warps before it in the thread block, and over all of that. Every
// thread of the block calls it.
struct Sums {
  uint32_t warp, before, all;
};

__device__ inline Sums sumOfWarps(uint32_t mine) {
  __shared__ uint32_t of_warp[kChunkWarps];
  for (uint32_t d = 1; d < kWarp; d *= 2)
    mine += __shfl_xor_sync(kWholeWarp, mine, d);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = mine;
  __syncthreads();
  Sums sums{mine, 0, 0};
  for (uint32_t w = 0; w < kChunkWarps; ++w) {
    if (w < threadIdx.x / kWarp) sums.before += of_warp[w];
    sums.all += of_warp[w];
  }
  __syncthreads();  // the next one's writes come after everybody has read this one's
  return sums;
}

// Of a warp's bits, those of threads before this one.
__device__ inline uint32_t countBefore(uint32_t ballot) {
  return static_cast<uint32_t>(__popc(ballot & ((1u << (threadIdx.x % kWarp)) - 1)));
}

}  // namespace

}  // namespace lowcomm::cuda
