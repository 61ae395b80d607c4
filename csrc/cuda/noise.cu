#include "cuda/noise.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "base/error.h"
#include "cuda/launch.cuh"
#include "cuda/tile.cuh"
#include "kernels/noise/noise_rules.h"

namespace lowcomm::cuda {
namespace {

template <class T>
struct NoiseArgs {
  T* out;
  const T* x;  // null: the sum alone
  uint64_t first, count;
  const NoiseTerm* terms;  // null: the carried ones
  size_t term_count;
  uint32_t stream;  // of all terms' keys
  NoiseTerm carried[kCarriedTerms];
};

// A warp takes kTiles blocks of 512 elements of the tensor at a time: all that a generator's call of its makes.
template <Noise kNoise>
constexpr uint32_t kTiles = kNoise == Noise::rademacher ? kRademacherBlock / kBlock : 1;

// Adds to sum[t] the group of terms from `from` on: four Philox calls a thread, one a lane of its tile, whose rows are
// just the thread's.
__device__ inline void addGroup(Tile (&sum)[kTiles<Noise::gaussian>], uint64_t block, const NoiseTerm* terms,
                                uint32_t stream, size_t from, size_t to, const Seat& seat) {
  Tile group{};
  for (size_t t = from; t < to; ++t) {
    const PhiloxKey key = {terms[t].key.seed, stream, terms[t].key.step};
    const float factor = terms[t].factor;
    for (uint32_t c = 0; c < 4; ++c) {
      float z[4];
      gaussianRows(z, philox((block * (kBlock / kGaussianBlock) + seat.group) * kNoiseLanes + 4 * seat.quad + c, key));
      for (uint32_t r = 0; r < 4; ++r) {
        const float value = roundedProduct(factor, z[r]);
        group.at[r][c] = t == from ? value : group.at[r][c] + value;
      }
    }
  }
  for (uint32_t r = 0; r < 4; ++r) {
    for (uint32_t c = 0; c < 4; ++c)
      sum[0].at[r][c] = from == 0 ? group.at[r][c] : sum[0].at[r][c] + group.at[r][c];
  }
}

// The sum of a group of up to four signs times factors has 16 values: thread i has that of the signs in i's lower four
// bits, and an element gets its own from the thread that its four signs name. The words of tile t are word t of the
// calls, which the warp's halves make for two terms at once.
__device__ inline void addGroup(Tile (&sum)[kTiles<Noise::rademacher>], uint64_t block, const NoiseTerm* terms,
                                uint32_t stream, size_t from, size_t to, const Seat& seat) {
  uint32_t words[2][4] = {};
#pragma unroll
  for (uint32_t pair = 0; pair < 2; ++pair) {
    const size_t t = from + 2 * pair + seat.thread / kLanes;
    if (t >= to) continue;
    const PhiloxWords made =
        philox(block / 4 * kNoiseLanes + seat.thread % kLanes, {terms[t].key.seed, stream, terms[t].key.step});
    for (uint32_t i = 0; i < 4; ++i)
      words[pair][i] = made.word[i];
  }
  float mine = 0;
  for (size_t t = from; t < to; ++t) {
    const float value = seat.thread >> (t - from) & 1 ? terms[t].factor : -terms[t].factor;
    mine = t == from ? value : mine + value;
  }
#pragma unroll
  for (uint32_t tile = 0; tile < 4; ++tile) {
    for (uint32_t c = 0; c < 4; ++c) {
      uint32_t signs = 0;  // byte r: those of row r, term i's in bit i
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t word = __shfl_sync(kWholeWarp, words[i / 2][tile], i % 2 * kLanes + 4 * seat.quad + c);
        const uint32_t rows = word >> (4 * seat.group) & 15;
        signs |= (rows * (0x00204081u << i)) & (0x01010101u << i);  // bit r to byte r
      }
      for (uint32_t r = 0; r < 4; ++r) {
        const float value = __shfl_sync(kWholeWarp, mine, signs >> (8 * r) & 15);
        float& element = sum[tile].at[r][c];
        element = from == 0 ? value : element + value;
      }
    }
  }
}

// Element `at` of the tensor is element at - first of x and out; those that are not there are left alone.
template <class T>
__device__ inline void addTile(const NoiseArgs<T>& args, uint64_t start, const Tile& sum, const Seat& seat) {
  const uint64_t end = args.first + args.count;
  const bool whole = start >= args.first && start + kBlock <= end;
  if (whole && isAligned(args.out + (start - args.first), sizeof(Four<T>)) &&
      (args.x == nullptr || isAligned(args.x + (start - args.first), sizeof(Four<T>)))) {
    Tile tile = sum;
    if (args.x != nullptr) {
      tile = loadTile(args.x + (start - args.first), kBlock, kBlock, seat);
      for (uint32_t i = 0; i < 16; ++i)
        tile.at[i / 4][i % 4] += sum.at[i / 4][i % 4];
    }
    storeTile(args.out + (start - args.first), kBlock, tile, seat);
    return;
  }
  for (uint32_t r = 0; r < 4; ++r) {
    for (uint32_t c = 0; c < 4; ++c) {
      const uint64_t at = start + seat.element(r) + c;
      if (at < args.first || at >= end) continue;
      const float z = sum.at[r][c];
      fromFloat(args.out[at - args.first], args.x == nullptr ? z : toFloat(args.x[at - args.first]) + z);
    }
  }
}

template <Noise kNoise, class T>
__global__ void __launch_bounds__(kThreads) addByWarp(const __grid_constant__ NoiseArgs<T> args) {
  const NoiseTerm* const terms = args.terms != nullptr ? args.terms : args.carried;
  const Seat seat = Seat::ofThisThread();
  constexpr uint64_t kShare = kTiles<kNoise> * kBlock;
  const uint64_t end = args.first + args.count, stride = uint64_t{gridDim.x} * kWarps * kShare;
  for (uint64_t start = args.first / kShare * kShare + (uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kShare;
       start < end; start += stride) {
    Tile sum[kTiles<kNoise>];  // in registers: only unrolled loops may index it
    for (size_t from = 0; from < args.term_count; from += kNoiseGroup) {
      const size_t to = from + kNoiseGroup < args.term_count ? from + kNoiseGroup : args.term_count;
      addGroup(sum, start / kBlock, terms, args.stream, from, to, seat);
    }
#pragma unroll
    for (uint32_t t = 0; t < kTiles<kNoise>; ++t)
      addTile(args, start + t * kBlock, sum[t], seat);
  }
}

constexpr const char* kDoing = "add noise";

template <Noise kNoise, class T>
void addAs(const Place& place, const NoiseArgs<T>& args) {
  constexpr uint64_t kShare = uint64_t{kWarps} * kTiles<kNoise> * kBlock;
  const DeviceScope scope(place.device, kDoing);
  const uint64_t wanted = (args.first + args.count - 1) / kShare - args.first / kShare + 1;
  launch(place, kDoing, addByWarp<kNoise, T>, gridOf(wanted, place.device, kDoing), kThreads, args);
}

// `terms` are the device's, or null, and then `carried` has them.
struct Terms {
  const NoiseTerm* terms;
  size_t count;
  uint32_t stream;
  std::span<const NoiseTerm> carried = {};
};

template <class T>
void add(const Place& place, Noise noise, void* out, const void* x, uint64_t first, uint64_t count,
         const Terms& terms) {
  NoiseArgs<T> args{
      static_cast<T*>(out), static_cast<const T*>(x), first, count, terms.terms, terms.count, terms.stream, {}};
  std::copy(terms.carried.begin(), terms.carried.end(), args.carried);
  noise == Noise::gaussian ? addAs<Noise::gaussian>(place, args) : addAs<Noise::rademacher>(place, args);
}

void addAny(const Place& place, Noise noise, void* out, const void* x, DType dtype, uint64_t first, uint64_t count,
            const Terms& terms) {
  const std::string doing = std::string(kDoing) + ": ";
  if (terms.count == 0) throw ValueError(doing + "terms: expected 1 or more, got 0");
  if (x == nullptr && dtype != DType::float32) {
    throw TypeError(doing + "elements without an x: expected float32, got " + dtypeName(dtype));
  }
  if (count == 0) return;
  switch (dtype) {
    case DType::float32:
      return add<float>(place, noise, out, x, first, count, terms);
    case DType::float16:
      return add<Float16>(place, noise, out, x, first, count, terms);
    case DType::bfloat16:
      return add<Bfloat16>(place, noise, out, x, first, count, terms);
    default:
      throw TypeError(doing + "elements: expected float32, float16 or bfloat16, got " + dtypeName(dtype));
  }
}

}  // namespace

void addNoise(const Place& place, Noise noise, void* out, const void* x, DType dtype, uint64_t first, uint64_t count,
              const NoiseTerm* terms, size_t term_count, uint32_t stream) {
  addAny(place, noise, out, x, dtype, first, count, {terms, term_count, stream});
}

void addNoise(const Place& place, Noise noise, void* out, const void* x, DType dtype, uint64_t first, uint64_t count,
              std::span<const NoiseTerm> terms, uint32_t stream) {
  if (terms.size() > kCarriedTerms) {
    throw ValueError(std::string(kDoing) + ": terms that a launch carries: expected up to " +
                     std::to_string(kCarriedTerms) + ", got " + std::to_string(terms.size()));
  }
  addAny(place, noise, out, x, dtype, first, count, {nullptr, terms.size(), stream, terms});
}

}  // namespace lowcomm::cuda
