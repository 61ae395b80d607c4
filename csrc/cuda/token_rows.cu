#include "cuda/token_rows.h"

#include <cuda_runtime.h>

#include "base/host_device.h"
#include "cuda/launch.cuh"
#include "kernels/noise/noise.h"
#include "kernels/noise/noise_rules.h"

namespace lowcomm::cuda {
namespace {

constexpr const char* kAddingRows = "add token rows";
constexpr unsigned kRowThreads = 128;

struct RowArgs {
  float* out;
  const float* x;  // null: the rows alone
  const int64_t* ids;
  uint64_t count, width, seed;
  float factor;
};

// A thread block takes a token's row at a time. Thread t makes the draws of lane t mod 16 of the noise block (t div 16)
// and on, and the elements that come of them: neighbouring threads have neighbouring elements.
template <Noise kNoise>
__global__ void __launch_bounds__(kRowThreads) addRows(const RowArgs args) {
  constexpr uint64_t kBlock = kNoise == Noise::gaussian ? kGaussianBlock : kRademacherBlock;
  constexpr uint32_t kRows = kBlock / kNoiseLanes;
  // A Rademacher call makes 128 elements: its words are made by several threads, which have some of its rows each.
  constexpr uint32_t kShare = kNoise == Noise::gaussian ? 4 : 16;
  const uint32_t lane = threadIdx.x % kNoiseLanes, group = threadIdx.x / kNoiseLanes;
  const uint64_t shares = (args.width + kShare * kNoiseLanes - 1) / (kShare * kNoiseLanes);
  for (uint64_t row = blockIdx.x; row < args.count; row += gridDim.x) {
    const PhiloxKey key{args.seed, static_cast<uint32_t>(args.ids[row]) & 0x7fffffffu, 0};
    float* const out = args.out + row * args.width;
    const float* const x = args.x == nullptr ? nullptr : args.x + row * args.width;
    for (uint64_t share = group; share < shares; share += kRowThreads / kNoiseLanes) {
      const uint64_t block = share * kShare / kRows;
      const uint32_t first = static_cast<uint32_t>(share * kShare % kRows);
      const PhiloxWords words = philox(block * kNoiseLanes + lane, key);
      float normals[4];
      if (kNoise == Noise::gaussian) gaussianRows(normals, words);
      for (uint32_t i = 0; i < kShare; ++i) {
        const uint64_t at = block * kBlock + (first + i) * kNoiseLanes + lane;
        if (at >= args.width) break;
        const float z = kNoise == Noise::gaussian ? normals[i % 4] : rademacherRow(words, first + i);
        const float value = roundedProduct(args.factor, z);
        out[at] = x == nullptr ? value : x[at] + value;
      }
    }
  }
}

}  // namespace

void addTokenRows(const Place& place, float* out, const float* x, const int64_t* ids, uint64_t count,
                  const TokenSigns& tokens, bool normal, float factor) {
  if (count == 0) return;
  const NoiseTerm term = tokenTerm(tokens, 0, factor);
  const RowArgs args{out, x, ids, count, tokens.width, term.key.seed, term.factor};
  const DeviceScope scope(place.device, kAddingRows);
  launch(place, kAddingRows, normal ? addRows<Noise::gaussian> : addRows<Noise::rademacher>,
         gridOf(count, place.device, kAddingRows), kRowThreads, args);
}

}  // namespace lowcomm::cuda
