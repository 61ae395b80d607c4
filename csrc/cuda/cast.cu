#include "cuda/plain.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "codec/family.h"
#include "codec/nonfinite.h"
#include "cuda/launch.cuh"
#include "cuda/line.cuh"
#include "cuda/tile.cuh"
#include "kernels/cast/cast_rules.h"

namespace lowcomm::cuda {
namespace {

struct CastArgs {
  uint64_t count, codes;  // elements; codes with those of the padding
  uint64_t block;         // number of the run's first block in the tensor
  PhiloxKey key;
  Nonfinite nonfinite;
  uint32_t* refused;
};

// Of the 512 that start at `start`: elements or codes.
__device__ inline uint32_t hereOf(uint64_t start, uint64_t count) {
  return count <= start ? 0 : count - start < kBlock ? static_cast<uint32_t>(count - start) : kBlock;
}

// Puts the number that the policy sends in the place of a NaN or an infinity; NaNs are marked where it is poison.
// Returns false where there is one and the policy is to refuse it. A type's infinity becomes its largest finite number.
template <class T>
__device__ inline bool mendCast(float& x, uint32_t c, Nonfinite how, uint32_t& nans) {
  if (!isSpecial(x)) return true;
  if (how == Nonfinite::saturate) {
    x = heldTo(floatOf(saturatedBits(floatBits(x), 0x7f800000u)), Narrow<T>::kLargest);
  } else {
    x = 0;
    nans |= 1u << c;
  }
  return how != Nonfinite::error;
}

template <class T, class Code>
__global__ void __launch_bounds__(kThreads) castByWarp(CastArgs args, Code* codes, const T* x) {
  const uint64_t stride = uint64_t{gridDim.x} * kWarps * kBlock;
  bool taken = true;
  for (uint64_t start = (uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kBlock; start < args.count;
       start += stride) {
    Four<T> four[4];
    loadFours(four, x + start, hereOf(start, args.count));
    const uint32_t n = hereOf(start, args.codes);
    for (uint32_t i = 0; i < 4; ++i) {
      float value[4];
      uint32_t nans = 0;
      for (uint32_t c = 0; c < 4; ++c) {
        value[c] = toFloat(four[i].at[c]);
        taken &= mendCast<T>(value[c], c, args.nonfinite, nans);
      }
      putFour(codes + start, i, n, n == kBlock, fourOf(Code{}, value, nans));
    }
  }
  if (!taken) *args.refused = 1;  // all who write, write 1
}

// The 16 random bits of a thread's tile: draw[c] of lane c, row r's in bits 16·(r mod 2) of word r / 2. Called by all
// threads of a warp.
//
// A Philox call serves 8 rows of a lane, that is two groups: each of those makes the calls of two of their four lanes
// and gives the other the half that is its.
__device__ inline void drawShorts(uint32_t draw[4][2], uint64_t block, const PhiloxKey& key, const Seat& seat) {
  const uint32_t half = seat.group % 2;
  uint32_t own[2][2], got[2][2];
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t lane = 4 * seat.quad + 2 * half + i;
    const PhiloxWords out = philox((block * 4 + seat.group / 2) * kLanes + lane, key);
    for (uint32_t k = 0; k < 2; ++k) {
      own[i][k] = half ? out.word[2 + k] : out.word[k];
      got[i][k] = __shfl_xor_sync(kWholeWarp, half ? out.word[k] : out.word[2 + k], 4);
    }
  }
  for (uint32_t c = 0; c < 4; ++c) {
    for (uint32_t k = 0; k < 2; ++k)
      draw[c][k] = c / 2 == half ? own[c % 2][k] : got[c % 2][k];
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) castByDraw(CastArgs args, Bfloat16* codes, const T* x) {
  const Seat seat = Seat::ofThisThread();
  const uint64_t stride = uint64_t{gridDim.x} * kWarps * kBlock;
  bool taken = true;
  for (uint64_t start = (uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kBlock; start < args.count;
       start += stride) {
    const uint32_t n = hereOf(start, args.count), padded = hereOf(start, args.codes);
    const Tile tile = loadTile(x + start, n, kBlock, seat);
    uint32_t draw[4][2];
    drawShorts(draw, args.block + start / kBlock, args.key, seat);
    for (uint32_t r = 0; r < 4; ++r) {
      Four<Bfloat16> four;
      uint32_t nans = 0;
      const uint32_t e = seat.element(r);
      for (uint32_t c = 0; c < 4; ++c) {
        float value = tile.at[r][c];
        taken &= mendCast<T>(value, c, args.nonfinite, nans);
        const uint32_t bits = draw[c][r / 2] >> (16 * (r % 2)) & 0xffffu;
        four.at[c].bits = bfloat16ByDraw(heldTo(value, kBfloat16Largest), bits);
        if (nans >> c & 1) four.at[c].bits = kBfloat16Nan;
        if (e + c >= n) four.at[c].bits = 0;
      }
      if (e < padded) storeFour(codes + start + e, four);
    }
  }
  if (!taken) *args.refused = 1;
}

// Whether a code that is no finite number is poison's own, where there is such.
template <class Code>
__device__ inline bool isSent(Code code, Nonfinite how) {
  return how == Nonfinite::poison && code.bits == Narrow<Code>::kNan;
}

// y[i] = the decoded value, or y[i] += that.
template <bool kAdd, class T, class Code>
__global__ void __launch_bounds__(kThreads) uncastByWarp(CastArgs args, T* y, const Code* codes) {
  const uint64_t stride = uint64_t{gridDim.x} * kWarps * kBlock;
  bool taken = true;
  for (uint64_t start = (uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kBlock; start < args.count;
       start += stride) {
    const uint32_t n = hereOf(start, args.count);
    const bool whole = n == kBlock && isAligned(y + start, sizeof(Four<T>));
    Four<Code> four[4];
    Four<T> before[4];
    loadFours(four, codes + start, hereOf(start, args.codes));
    if (kAdd) loadFours(before, y + start, n);
    for (uint32_t i = 0; i < 4; ++i) {
      float value[4];
      uint32_t nans = 0;
      for (uint32_t c = 0; c < 4; ++c) {
        const Code code = four[i].at[c];
        if (elementOfFour(i) + c >= n) taken &= code.bits == 0;
        value[c] = toFloat(code);
        if (isSpecial(value[c])) {
          nans |= 1u << c;  // by name: a device's arithmetic has a NaN of its own
          taken &= isSent(code, args.nonfinite);
        }
        if (kAdd) value[c] = toFloat(before[i].at[c]) + value[c];
      }
      putFour(y + start, i, n, whole, fourOf(T{}, value, nans));
    }
  }
  if (!taken) *args.refused = 1;
}

CastArgs castArgs(const char* doing, const PlainRun& run, const void* payload, uint64_t block, const PhiloxKey& key,
                  uint32_t* refused) {
  checkRun(doing, run.codec, isCast(run.codec.id), "fp16, bf16 or fp8e4m3", run.dtype, payload);
  const size_t item = run.codec.id == CodecId::fp8e4m3 ? 1 : 2;
  return {run.count, up64(run.count * item) / item, block, key, run.codec.nonfinite, refused};
}

template <class Kernel, class To, class From>
void launchCast(const Place& place, const char* doing, Kernel* kernel, const CastArgs& args, To* to, const From* from) {
  const DeviceScope scope(place.device, doing);
  launchByWarps(place, doing, kernel, args.count, args, to, from);
}

template <class T>
void encodeFrom(const Place& place, const CastArgs& args, const CodecSpec& codec, void* payload, const T* x) {
  constexpr const char* kWhat = "encode cast";
  if constexpr (!std::is_same_v<T, Bfloat16>) {  // elements of the type itself travel as they are
    if (codec.stochastic) {
      return launchCast(place, kWhat, castByDraw<T>, args, static_cast<Bfloat16*>(payload), x);
    }
  }
  switch (codec.id) {
    case CodecId::fp16:
      return launchCast(place, kWhat, castByWarp<T, Float16>, args, static_cast<Float16*>(payload), x);
    case CodecId::bf16:
      return launchCast(place, kWhat, castByWarp<T, Bfloat16>, args, static_cast<Bfloat16*>(payload), x);
    default:
      return launchCast(place, kWhat, castByWarp<T, Float8>, args, static_cast<Float8*>(payload), x);
  }
}

template <bool kAdd, class T>
void decodeTo(const Place& place, const char* doing, const CastArgs& args, CodecId id, T* y, const void* payload) {
  switch (id) {
    case CodecId::fp16:
      return launchCast(place, doing, uncastByWarp<kAdd, T, Float16>, args, y, static_cast<const Float16*>(payload));
    case CodecId::bf16:
      return launchCast(place, doing, uncastByWarp<kAdd, T, Bfloat16>, args, y, static_cast<const Bfloat16*>(payload));
    default:
      return launchCast(place, doing, uncastByWarp<kAdd, T, Float8>, args, y, static_cast<const Float8*>(payload));
  }
}

}  // namespace

void encodeCast(const Place& place, const PlainRun& run, void* payload, const void* x, uint64_t block,
                const PhiloxKey& key, uint32_t* refused) {
  const CastArgs args = castArgs("encode cast", run, payload, block, key, refused);
  if (run.count == 0) return;
  withElements(run.dtype, x, [&](const auto* x) { encodeFrom(place, args, run.codec, payload, x); });
}

void decodeCast(const Place& place, const PlainRun& run, void* y, const void* payload, uint32_t* refused) {
  constexpr const char* kWhat = "decode cast";
  const CastArgs args = castArgs(kWhat, run, payload, 0, {}, refused);
  if (run.count == 0) return;
  withElements(run.dtype, y, [&](auto* y) { decodeTo<false>(place, kWhat, args, run.codec.id, y, payload); });
}

void decodeAddCast(const Place& place, const PlainRun& run, float* acc, const void* payload, uint32_t* refused) {
  constexpr const char* kWhat = "decode and add cast";
  const CastArgs args = castArgs(kWhat, run, payload, 0, {}, refused);
  if (run.count == 0) return;
  decodeTo<true>(place, kWhat, args, run.codec.id, acc, payload);
}

}  // namespace lowcomm::cuda
