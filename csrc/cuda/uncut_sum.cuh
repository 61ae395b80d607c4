#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/uncut_spread.cuh"
#include "base/host_device.h"

// The second read of an encode whose ranges are means: sums in the order of FORMAT.md, "Sums".

namespace lowcomm::cuda {

namespace {

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
