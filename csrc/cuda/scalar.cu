#include "cuda/plain.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "codec/family.h"
#include "codec/nonfinite.h"
#include "codec/scalar_rules.h"
#include "cuda/launch.cuh"
#include "cuda/line.cuh"
#include "cuda/tile.cuh"
#include "kernels/finite.h"

namespace lowcomm::cuda {
namespace {

struct ScalarArgs {
  ScalarTable table;
  uint64_t count, words;  // elements; words of the payload
  uint32_t* refused;
};

// The table where threads that look for different numbers do not wait for each other.
__device__ inline const ScalarTable& sharedTable(const ScalarTable& table) {
  __shared__ ScalarTable shared;
  static_assert(sizeof(ScalarTable) % 4 == 0);
  for (uint32_t i = threadIdx.x; i < sizeof(ScalarTable) / 4; i += blockDim.x)
    reinterpret_cast<uint32_t*>(&shared)[i] = reinterpret_cast<const uint32_t*>(&table)[i];
  __syncthreads();
  return shared;
}

// Words of the payload in a block's share of it, which begins with word `first`.
__device__ inline uint32_t wordsHere(uint64_t first, const ScalarArgs& args) {
  const uint64_t left = args.words - first, most = kBlock / 32 * args.table.bits;
  return static_cast<uint32_t>(left < most ? left : most);
}

// The codes of four i, 32 bits of them or 36 in a run of bits, as words of the block. Eight threads' 36 bits are nine
// words: thread k of them has 4·k bits of word k from its neighbour, and the last has word 8 too. Called by all threads
// of a warp.
__device__ inline void storeCodes(uint32_t* words, uint32_t present, uint32_t i, uint64_t codes, uint32_t bits) {
  const uint32_t thread = threadIdx.x % kWarp;
  const auto store = [&](uint32_t word, uint64_t value) {
    if (word < present) words[word] = static_cast<uint32_t>(value);
  };
  if (bits == 8) return store(32 * i + thread, codes);
  const uint32_t k = thread % 8, word = 9 * (4 * i + thread / 8) + k;
  const uint32_t mine = static_cast<uint32_t>(codes >> (32 - 4 * k));  // the part that is in the next thread's word
  const uint32_t before = __shfl_sync(kWholeWarp, mine, (thread + kWarp - 1) % kWarp);
  store(word, codes << (4 * k) | (k > 0 ? before : 0));
  if (k == 7) store(word + 1, mine);
}

__device__ inline uint64_t loadCodes(const uint32_t* words, uint32_t present, uint32_t i, uint32_t bits) {
  const uint32_t at = elementOfFour(i) * bits, word = at / 32;
  const uint64_t low = word < present ? words[word] : 0;
  if (bits == 8) return low;
  const uint64_t high = word + 1 < present ? words[word + 1] : 0;
  return (low | high << 32) >> (at % 32) & 0xfffffffffu;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    scalarsByWarp(const __grid_constant__ ScalarArgs args, uint32_t* words, const T* x) {
  const ScalarTable& table = sharedTable(args.table);
  const uint32_t bits = args.table.bits;
  const uint64_t stride = uint64_t{gridDim.x} * kWarps * kBlock;
  for (uint64_t start = (uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kBlock; start < args.count;
       start += stride) {
    const uint32_t n = args.count - start < kBlock ? static_cast<uint32_t>(args.count - start) : kBlock;
    const uint64_t first = start / 32 * bits;
    Four<T> four[4];
    loadFours(four, x + start, n);  // zeros past the end, whose code is 0
    for (uint32_t i = 0; i < 4; ++i) {
      uint64_t codes = 0;
      for (uint32_t c = 0; c < 4; ++c)
        codes |= uint64_t{scalarCode(table, toFloat(four[i].at[c]))} << (bits * c);
      storeCodes(words + first, wordsHere(first, args), i, codes, bits);
    }
  }
}

// y[i] = the decoded value, or y[i] += that.
template <bool kAdd, class T>
__global__ void __launch_bounds__(kThreads)
    unscaleByWarp(const __grid_constant__ ScalarArgs args, T* y, const uint32_t* words) {
  const ScalarTable& table = sharedTable(args.table);
  const uint32_t bits = args.table.bits, mask = (1u << bits) - 1;
  const uint64_t stride = uint64_t{gridDim.x} * kWarps * kBlock;
  bool taken = true;
  for (uint64_t start = (uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kBlock; start < args.count;
       start += stride) {
    const uint32_t n = args.count - start < kBlock ? static_cast<uint32_t>(args.count - start) : kBlock;
    const bool whole = n == kBlock && isAligned(y + start, sizeof(Four<T>));
    const uint64_t first = start / 32 * bits;
    Four<T> before[4];
    if (kAdd) loadFours(before, y + start, n);
    for (uint32_t i = 0; i < 4; ++i) {
      const uint64_t codes = loadCodes(words + first, wordsHere(first, args), i, bits);
      float value[4];
      uint32_t nans = 0;
      for (uint32_t c = 0; c < 4; ++c) {
        const uint32_t code = static_cast<uint32_t>(codes >> (bits * c)) & mask;
        if (elementOfFour(i) + c >= n) taken &= code == 0;
        value[c] = scalarValue(table, code);
        nans |= (code == 1u << (bits - 1) ? 1u : 0u) << c;  // by name: a device's arithmetic has a NaN of its own
        if (kAdd) value[c] = toFloat(before[i].at[c]) + value[c];
      }
      putFour(y + start, i, n, whole, fourOf(T{}, value, nans));
    }
  }
  if (!taken) *args.refused = 1;  // all who write, write 1
}

ScalarArgs scalarArgs(const char* doing, const PlainRun& run, const void* payload, uint32_t* refused) {
  const CodecId id = run.codec.id;
  checkRun(doing, run.codec, id == CodecId::logbyte || id == CodecId::log9, "logbyte or log9", run.dtype, payload);
  const ScalarTable& table = id == CodecId::logbyte ? kLogByteTable : kLog9Table;
  return {table, run.count, up64((run.count * table.bits + 7) / 8) / 4, refused};
}

template <class Kernel, class To, class From>
void launchScalar(const Place& place, const char* doing, Kernel* kernel, const ScalarArgs& args, To* to,
                  const From* from) {
  const DeviceScope scope(place.device, doing);
  launchByWarps(place, doing, kernel, args.count, args, to, from);
}

}  // namespace

void encodeScalar(const Place& place, const PlainRun& run, void* payload, const void* x) {
  constexpr const char* kWhat = "encode scalar";
  const ScalarArgs args = scalarArgs(kWhat, run, payload, nullptr);
  auto* words = static_cast<uint32_t*>(payload);
  if (run.count == 0) return;
  withElements(run.dtype, x,
               [&]<class T>(const T* x) { launchScalar(place, kWhat, scalarsByWarp<T>, args, words, x); });
}

void decodeScalar(const Place& place, const PlainRun& run, void* y, const void* payload, uint32_t* refused) {
  constexpr const char* kWhat = "decode scalar";
  const ScalarArgs args = scalarArgs(kWhat, run, payload, refused);
  const auto* words = static_cast<const uint32_t*>(payload);
  if (run.count == 0) return;
  withElements(run.dtype, y,
               [&]<class T>(T* y) { launchScalar(place, kWhat, unscaleByWarp<false, T>, args, y, words); });
}

void decodeAddScalar(const Place& place, const PlainRun& run, float* acc, const void* payload, uint32_t* refused) {
  constexpr const char* kWhat = "decode and add scalar";
  const ScalarArgs args = scalarArgs(kWhat, run, payload, refused);
  if (run.count == 0) return;
  launchScalar(place, kWhat, unscaleByWarp<true, float>, args, acc, static_cast<const uint32_t*>(payload));
}

}  // namespace lowcomm::cuda
