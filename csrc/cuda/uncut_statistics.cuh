#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "base/host_device.h"
#include "cuda/element.cuh"
#include "cuda/repair.cuh"
#include "cuda/tile.cuh"
#include "cuda/uncut_args.cuh"
#include "kernels/finite.h"
#include "kernels/grid/grid_rules.h"

// The statistics that an encode reads before it makes codes: how far apart a channel's elements are, and which of them
// no codec takes; then, where a range is a mean, their sum.

namespace lowcomm::cuda {

namespace {

// Elements that no codec takes, as bits of `odd`: what nonfinite=saturate makes of each stays within what the others
// span, except for its sign.
constexpr uint32_t kNanSeen = 1, kTooHighSeen = 2, kTooLowSeen = 4;

// Least and largest element of those a codec takes, as integers in the order of the numbers, so that threads join
// theirs by atomicMax; 0, below all, is what they start from. The least is kept by its complement.
__device__ inline uint32_t orderOf(float x) {
  const uint32_t bits = floatBits(x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ inline float floatOfOrder(uint32_t order) {
  return floatOf(order ^ (order >> 31 ? 0x80000000u : 0xffffffffu));
}

struct ColumnExtremes {
  uint32_t low = 0, high = 0, odd = 0;

  __device__ void take(float x) {
    const uint32_t bits = floatBits(x), magnitude = bits & kMagnitude;
    if (magnitude >= kFiniteLimitBits) {
      odd |= magnitude > 0x7f800000u ? kNanSeen : bits >> 31 ? kTooLowSeen : kTooHighSeen;
      return;
    }
    const uint32_t order = orderOf(x);
    low = ~order > low ? ~order : low;
    high = order > high ? order : high;
  }
};

// A channel as it is encoded: under saturate the odd ones are mended.
struct Spread {
  float low, high;
  uint32_t largest;  // magnitude, its bits
  bool odd;
};

__device__ inline Spread spreadOf(const UncutArgs<std::byte>& args, uint32_t channel) {
  const uint32_t odd = args.odd[channel];
  if (args.high[channel] == 0) return {0, 0, 0, odd != 0};  // none is taken: zeros stand for all
  float low = floatOfOrder(~args.low[channel]), high = floatOfOrder(args.high[channel]);
  const float taken = fmaxf(fabsf(low), fabsf(high));
  if (odd & kNanSeen) {
    low = fminf(low, 0.0f);
    high = fmaxf(high, 0.0f);
  }
  if (odd & kTooHighSeen) high = taken;
  if (odd & kTooLowSeen) low = -taken;
  return {low, high, floatBits(taken), odd != 0};
}

constexpr uint32_t kSpreadWarps = 8;
constexpr uint32_t kSpreadColumns = 4 * kWarp;  // of a thread block

// Elements as rows of `columns`, a multiple of the channels and of 4: a column is of one channel. A thread block takes
// 128 columns and every `slices`-th of the groups of eight rows, a warp a row of the eight, a thread four columns.
template <class T>
__global__ void __launch_bounds__(kSpreadWarps* kWarp)
    spreadColumns(UncutArgs<std::byte> args, const T* x, uint32_t columns, uint32_t tiles, uint32_t slices) {
  __shared__ uint32_t all[3][kSpreadColumns];
  for (uint32_t i = threadIdx.x; i < 3 * kSpreadColumns; i += blockDim.x)
    all[i / kSpreadColumns][i % kSpreadColumns] = 0;
  __syncthreads();
  const uint32_t first = blockIdx.x % tiles * kSpreadColumns, mine = threadIdx.x % kWarp * 4, column = first + mine;
  if (column < columns && column < args.count) {
    ColumnExtremes seen[4];
    const uint64_t rows = (args.count - column + columns - 1) / columns;
#pragma unroll 4
    for (uint64_t row = uint64_t{blockIdx.x} / tiles * kSpreadWarps + threadIdx.x / kWarp; row < rows;
         row += uint64_t{slices} * kSpreadWarps) {
      const T* at = x + row * columns + column;
      if (row * columns + column + 4 <= args.count && isAligned(at, sizeof(Four<T>))) {
        const Four<T> four = *reinterpret_cast<const Four<T>*>(at);
        for (uint32_t c = 0; c < 4; ++c)
          seen[c].take(toFloat(four.at[c]));
      } else {
        for (uint32_t c = 0; c < 4; ++c) {
          if (row * columns + column + c < args.count) seen[c].take(toFloat(at[c]));
        }
      }
    }
    for (uint32_t c = 0; c < 4; ++c) {
      atomicMax(&all[0][mine + c], seen[c].low);
      atomicMax(&all[1][mine + c], seen[c].high);
      if (seen[c].odd != 0) atomicOr(&all[2][mine + c], seen[c].odd);
    }
  }
  __syncthreads();
  if (threadIdx.x >= kSpreadColumns || first + threadIdx.x >= columns) return;
  const uint32_t channel = (first + threadIdx.x) % args.channels;
  if (all[0][threadIdx.x] != 0) atomicMax(args.low + channel, all[0][threadIdx.x]);
  if (all[1][threadIdx.x] != 0) atomicMax(args.high + channel, all[1][threadIdx.x]);
  if (all[2][threadIdx.x] != 0) atomicOr(args.odd + channel, all[2][threadIdx.x]);
}

// ---- sums, in the order of FORMAT.md, "Sums" ----

constexpr uint32_t kPartials = 64;
constexpr uint32_t kMostTogether = 8;  // channels of a thread block: 32 bytes of float32 in a row

// A thread has one partial sum of one channel, and adds to it every 64th row's element. It asks for many elements
// before it adds the first: nothing else hides how far memory is.
template <class T>
__global__ void __launch_bounds__(kPartials* kMostTogether)
    sumChannels(UncutArgs<std::byte> args, const T* x, uint32_t together, bool squares) {
  __shared__ float partials[kPartials * kMostTogether];
  const uint32_t number = threadIdx.x / together, channel = blockIdx.x * together + threadIdx.x % together;
  float partial = 0;
  if (number < kPartials && channel < args.channels) {
    const uint32_t largest = spreadOf(args, channel).largest;
    const float down = scaleDown(largest);
    const bool mends = args.nonfinite == Nonfinite::saturate;
    const auto add = [&](float of) {
      const float y = roundedProduct(mends ? mended(of, largest, kFiniteLimitBits) : of, down);
      partial += squares ? roundedProduct(y, y) : fabsf(y);
    };
    constexpr uint32_t kAhead = 32;
    const uint64_t rows = args.count / args.channels, hop = uint64_t{kPartials} * args.channels;
    const T* at = x + uint64_t{number} * args.channels + channel;
    uint64_t row = number;
    for (; row + (kAhead - 1) * kPartials < rows; row += kAhead * kPartials, at += kAhead * hop) {
      float of[kAhead];
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i)
        of[i] = toFloat(at[i * hop]);
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i)
        add(of[i]);
    }
    for (; row < rows; row += kPartials, at += hop)
      add(toFloat(*at));
  }
  partials[threadIdx.x] = partial;
  __syncthreads();
  if (number != 0 || channel >= args.channels) return;
  float* mine = partials + threadIdx.x;
  for (uint32_t half = kPartials / 2; half > 0; half /= 2) {
    for (uint32_t i = 0; i < half; ++i)
      mine[i * together] += mine[(i + half) * together];
  }
  args.sums[channel] = mine[0];
}

}  // namespace

}  // namespace lowcomm::cuda
