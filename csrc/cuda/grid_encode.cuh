#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/block_team.cuh"
#include "cuda/codebook.cuh"
#include "cuda/grid_args.cuh"
#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/tile.cuh"
#include "cuda/warp_team.cuh"
#include "kernels/finite.h"
#include "kernels/grid/grid_form.h"
#include "kernels/grid/grid_rules.h"

// The encode kernels of one element type. CMake makes a file a type of instance.cu.in, so that each compiles by itself
// and at the same time as the others.

namespace lowcomm::cuda {

namespace {

template <GridRule kRule>
constexpr bool kCentred = kRule == GridRule::centred || kRule == GridRule::sign || kRule == GridRule::gauss;

template <GridRule kRule>
constexpr bool kByBook = kRule == GridRule::levels || kRule == GridRule::gauss;

// The numbers that turn a bucket's elements into codes.
struct Scale {
  float base, inverse, magic;
  uint32_t top;  // the largest code; 0 for a bucket whose codes are not to be seen
};

struct Extremes {
  float low, high;
};

// fminf and fmaxf pass over a NaN, here and on a CPU: it shows in its own code (isFixed).
template <class Team>
__device__ inline Extremes extremesOf(Team& team) {
  float low = floatOf(0x7f800000u), high = floatOf(0xff800000u);
  const auto lower = [&](float x) { low = fminf(low, x); };
  const auto raise = [&](float x) { high = fmaxf(high, x); };
  team.each([&](const Tile& tile, uint64_t, uint32_t) {
    tile.each(lower);
    tile.each(raise);
  });
  team.share([&] { return low; }, lower);
  team.share([&] { return high; }, raise);
  return {low, high};
}

// Bits of the largest |x|, as integers: NaN is the largest of all.
template <class Team>
__device__ inline uint32_t largestOf(Team& team) {
  constexpr uint32_t kMagnitude = 0x7fffffffu;
  uint32_t largest = 0;
  const auto take = [&](uint32_t magnitude) { largest = magnitude > largest ? magnitude : largest; };
  team.each(
      [&](const Tile& tile, uint64_t, uint32_t) { tile.each([&](float x) { take(floatBits(x) & kMagnitude); }); });
  team.share([&] { return largest; }, take);
  return largest;
}

// A grid around 0. `taken` becomes false where the bucket has what it cannot send.
template <GridRule kRule, class Team>
__device__ inline Scale centredBucket(Team& team, BucketMeta& sent, bool& taken, const GridArgs<std::byte>& grid) {
  const uint32_t largest = largestOf(team);
  taken &= largest < kFiniteLimitBits;
  float range = floatOf(largest);
  if (kRule == GridRule::sign || grid.form.rms) {
    const uint64_t left = grid.codes - team.first();  // in a bucket that is not there: of no account
    const uint32_t count = left <= grid.form.bucket ? static_cast<uint32_t>(left - grid.form.absent) : grid.form.bucket;
    const float down = scaleDown(largest);
    if (kRule == GridRule::sign) {
      range = meanOf(team.sum([&](float x) { return fabsf(roundedProduct(x, down)); }), count, largest);
    } else {
      const float squares = team.sum([&](float x) {
        const float y = roundedProduct(x, down);
        return roundedProduct(y, y);
      });
      range = 2 * rmsOf(squares, count, largest);
    }
  }
  const CentredScale scale = centredScale(range, grid.form);
  sent = {0, scale.step};
  return {0, scale.inverse, 0, (1u << grid.bits) - 1};
}

// A grid from a bucket's minimum to its maximum.
template <GridRule kRule, class Team, class T>
__device__ inline Scale affineBucket(Team& team, BucketMeta& sent, bool& taken, const EncodeArgs<T>& args) {
  const GridArgs<std::byte>& grid = args.grid;
  const uint32_t top = (1u << grid.bits) - 1;
  const Extremes range = extremesOf(team);
  const float steps = kRule == GridRule::levels ? 1 : static_cast<float>(top);
  const AffineScale scale = affineScale(range.low, range.high, steps, grid.form);
  taken &= range.low > -kFiniteLimit && range.high < kFiniteLimit;
  sent = {scale.base, scale.step};
  float magic = kRule == GridRule::stochastic ? kStochasticMagic : kNearestMagic;
  if (kRule == GridRule::dithered) {
    const uint64_t number = (args.block * kBlock + team.first()) >> grid.bucket_log2;
    const float dither =
        ditherOf(philox(number, {args.key.seed, args.key.stream | kBucketStream, args.key.step}).word[0]);
    magic = 256.0f + dither;
    sent.base = shiftedBase(scale.base, scale.step, dither);
  }
  return {scale.base, scale.inverse, magic, top};
}

// The nodes of the tree of thresholds below which the tile's elements end. All of them take a step together: a look-up
// takes longer than a few operations.
template <GridRule kRule>
__device__ inline void descend(uint32_t node[4][4], const Tile& tile, const Scale& scale, const float* tree,
                               uint32_t bits) {
  Tile quotient = tile;
  quotient.each([&](float& x) {
    x = kRule == GridRule::gauss ? roundedProduct(x, scale.inverse) : gridQuotient(x, scale.base, scale.inverse);
  });
  for (uint32_t i = 0; i < 16; ++i)
    node[i / 4][i % 4] = 1;
  for (uint32_t step = 0; step < bits; ++step) {
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i)
      node[i / 4][i % 4] = nodeBelow(tree, node[i / 4][i % 4], quotient.at[i / 4][i % 4]);
  }
}

// Quantizes and writes one block; false where an element has no place on the grid. The thread's codes stay in `field`,
// bits of others above them. `tree`: of levels and gauss.
template <GridRule kRule, bool kRotated, class T>
__device__ inline bool encodeTile(uint32_t (&field)[4], const EncodeArgs<T>& args, uint64_t start, const Tile& tile,
                                  const Scale& scale, const float* tree, const Seat& seat) {
  const uint32_t bits = args.grid.bits;
  uint32_t draw[4] = {}, node[4][4] = {};
  if constexpr (kByBook<kRule>) descend<kRule>(node, tile, scale, tree, bits);
  if (kRule == GridRule::stochastic) drawTile(draw, args.block + start / kBlock, args.key, seat);
  uint32_t strays = 0;
  for (uint32_t r = 0; r < 4; ++r) {
    for (uint32_t c = 0; c < 4; ++c) {
      const float x = tile.at[r][c];
      uint32_t fixed = node[r][c] << 15;
      if (kRule == GridRule::gauss) {
        // The largest magnitude has told of what has no place.
      } else if (kRule == GridRule::levels) {
        strays |= gridFixed(x, scale.base, scale.inverse, scale.magic) ^ kFixedExponent;
      } else if (kRule == GridRule::sign) {
        fixed = signFixed(x);
      } else if (kRule == GridRule::centred) {
        fixed = centredFixed(x, scale.inverse, args.grid.form);
      } else {
        fixed = gridFixed(x, scale.base, scale.inverse, scale.magic);
        strays |= fixed ^ kFixedExponent;  // one operation an element: the upper 9 bits stay 0 while all are in range
      }
      if (kRule == GridRule::stochastic) fixed = withDraw(fixed, (draw[c] >> (8 * r)) & 255);
      // gridCode(fixed) << (bits * r) by a rotation, so that one more operation masks and joins.
      field[c] |= __funnelshift_l(fixed, fixed, bits * r + 32 - 15) & (scale.top << (bits * r));
    }
  }
  if (const uint32_t n = elementsOf(start, args.grid.count); n < kBlock) {
    for (uint32_t c = 0; c < 4; ++c)
      field[c] &= presentBits(c, n, bits, kRotated, seat);
  }
  storeFields(args.grid.words + start / 8 * bits, field, elementsOf(start, args.grid.codes), bits, seat);
  return isFixed(strays ^ kFixedExponent);
}

// All of a team's buckets, in the order of FORMAT.md. False where a codec refuses one. After each block,
// then(its first element, how many it has, the thread's codes as encodeTile leaves them, what is sent of the thread's
// bucket, whether its range can be sent).
template <GridRule kRule, bool kRotated, class Team, class T, class Then>
__device__ inline bool encodeTeam(Team& team, const EncodeArgs<T>& args, const float* tree, const Seat& seat,
                                  Then&& then) {
  const GridArgs<std::byte>& grid = args.grid;
  bool taken = true;
  // A bucket with elements that the codec does not take is encoded as zeros, and decodes to NaN.
  const bool poisoned = grid.nonfinite == Nonfinite::poison && largestOf(team) >= grid.limit;
  if (poisoned) team.blank();
  if constexpr (kRotated) team.rotate(/*fill=*/!kCentred<kRule>);
  BucketMeta sent;
  Scale scale;
  if constexpr (kCentred<kRule>) {
    scale = centredBucket<kRule>(team, sent, taken, grid);
  } else {
    scale = affineBucket<kRule>(team, sent, taken, args);
  }
  if (poisoned) {
    const float nan = floatOf(kPoison);
    sent = kCentred<kRule> ? BucketMeta{0, nan} : BucketMeta{nan, 0};
    scale.top = 0;
  }
  if (team.isFirstThread() && team.first() < grid.count) {
    storeSent<kCentred<kRule>>(grid, team.first() >> grid.bucket_log2, sent);
  }
  const bool in_range = taken;
  team.each([&](const Tile& tile, uint64_t start, uint32_t n) {
    uint32_t field[4] = {};
    taken &= encodeTile<kRule, kRotated>(field, args, start, tile, scale, tree, seat);
    then(start, n, field, sent, in_range);
  });
  return taken && team.taken();
}

// Where a payload is all that is made.
struct NothingElse {
  __device__ void operator()(uint64_t, uint32_t, const uint32_t (&)[4], const BucketMeta&, bool) const {}
};

__device__ inline void zeroPadding(const GridArgs<std::byte>& grid) {
  if (blockIdx.x == 0 && threadIdx.x < grid.pad_halves) reinterpret_cast<uint16_t*>(grid.pad)[threadIdx.x] = 0;
}

template <GridRule kRule, bool kRotated, uint32_t kTiles, class T>
__global__ void __launch_bounds__(kThreads)
    encodeByWarp(const __grid_constant__ EncodeArgs<T> args, const __grid_constant__ BookArgs<kByBook<kRule>> book) {
  const Seat seat = Seat::ofThisThread();
  const uint64_t stride = uint64_t{gridDim.x} * kWarps * kTiles * kBlock;
  const float* tree = shareBook(book, args.grid.bits);
  zeroPadding(args.grid);
  bool taken = true;
  for (uint64_t start = (uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kTiles * kBlock;
       start < args.grid.count; start += stride) {
    WarpTeam<kTiles, kRotated, T> team(args, start, seat);
    taken &= encodeTeam<kRule, kRotated>(team, args, tree, seat, NothingElse{});
  }
  if (!taken) *args.grid.refused = 1;  // all who write, write 1
}

// Registers for two thread blocks on a processor: while one waits at a barrier, the other works. Without that the
// rotation's masks, kept from block to block, leave room for one.
template <GridRule kRule, bool kRotated, class T>
__global__ void __launch_bounds__(kMostWarps* kWarp, 2)
    encodeByBlock(const __grid_constant__ EncodeArgs<T> args, const __grid_constant__ BookArgs<kByBook<kRule>> book) {
  const Seat seat = Seat::ofThisThread();
  const uint64_t bucket = args.grid.form.bucket;
  const float* tree = shareBook(book, args.grid.bits);
  zeroPadding(args.grid);
  bool taken = true;
  for (uint64_t first = blockIdx.x * bucket; first < args.grid.count; first += gridDim.x * bucket) {
    BlockTeam<kRotated, T> team(args, first, seat);
    taken &= encodeTeam<kRule, kRotated>(team, args, tree, seat, NothingElse{});
  }
  if (!taken) *args.grid.refused = 1;
}

// Warps that take one or two blocks at a time for buckets of up to 1024 elements, a thread block for a larger one.
template <class Kernel, class... Args>
void launchByBuckets(const Place& place, const char* doing, const GridArgs<std::byte>& grid, Kernel* one, Kernel* two,
                     Kernel* by_block, uint32_t most_warps, const Args&... args) {
  const uint32_t bucket = grid.form.bucket;
  const DeviceScope scope(place.device, doing);
  if (bucket > 2 * kBlock) {
    const uint64_t buckets = (grid.count + bucket - 1) / bucket;
    const uint32_t warps = std::min(bucket / kBlock, most_warps);
    launch(place, doing, by_block, gridOf(buckets, place.device, doing), warps * kWarp, args...);
    return;
  }
  const uint32_t tiles = bucket > kBlock ? 2 : 1;
  const uint64_t share = uint64_t{kWarps} * tiles * kBlock;
  const unsigned blocks = gridOf((grid.count + share - 1) / share, place.device, doing);
  launch(place, doing, tiles == 2 ? two : one, blocks, kThreads, args...);
}

template <GridRule kRule, bool kRotated, class T>
void encodeAs(const Place& place, const EncodeArgs<T>& args, const BookArgs<kByBook<kRule>>& book) {
  launchByBuckets(place, "encode grid", args.grid, encodeByWarp<kRule, kRotated, 1, T>,
                  encodeByWarp<kRule, kRotated, 2, T>, encodeByBlock<kRule, kRotated, T>, kMostWarps, args, book);
}

template <GridRule kRule, class T>
void encodeWithoutBook(const Place& place, const EncodeArgs<T>& args) {
  args.grid.rotated ? encodeAs<kRule, true>(place, args, {}) : encodeAs<kRule, false>(place, args, {});
}

}  // namespace

template <class T>
void encodeRun(const Place& place, const EncodeArgs<T>& args, GridRule rule, const BookArgs<true>* thresholds) {
  switch (rule) {
    case GridRule::nearest:
      return encodeWithoutBook<GridRule::nearest>(place, args);
    case GridRule::stochastic:
      return encodeWithoutBook<GridRule::stochastic>(place, args);
    case GridRule::dithered:
      return encodeWithoutBook<GridRule::dithered>(place, args);
    case GridRule::centred:
      return encodeWithoutBook<GridRule::centred>(place, args);
    case GridRule::sign:
      return encodeWithoutBook<GridRule::sign>(place, args);
    case GridRule::levels:
      return encodeAs<GridRule::levels, false>(place, args, *thresholds);
    case GridRule::gauss:
      return encodeAs<GridRule::gauss, true>(place, args, *thresholds);
  }
}

}  // namespace lowcomm::cuda

#define LOWCOMM_GRID_ENCODE(T)                                                                  \
  namespace lowcomm::cuda {                                                                     \
  template void encodeRun(const Place&, const EncodeArgs<T>&, GridRule, const BookArgs<true>*); \
  }
