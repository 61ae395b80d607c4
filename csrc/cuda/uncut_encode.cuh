#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/grid_args.cuh"
#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/tile.cuh"
#include "cuda/uncut_args.cuh"
#include "cuda/uncut_statistics.cuh"
#include "kernels/grid/grid_rules.h"

// The encode of one element type, kernel by kernel. CMake makes a file a type of instance.cu.in.

namespace lowcomm::cuda {

namespace {

constexpr uint32_t kBlanked = 0xffffffffu;  // in place of a magnitude: the channel is poisoned

// Makes every channel's scale of what the reads before found, for the codes, and sends it.
__global__ void __launch_bounds__(kThreads) scaleChannels(UncutArgs<std::byte> args, GridRule rule, PhiloxKey key) {
  if (blockIdx.x == 0 && threadIdx.x < args.pad_bytes) args.pad[threadIdx.x] = std::byte{0};
  const GridForm& form = args.form;
  const float top = static_cast<float>((1u << args.bits) - 1);
  bool taken = true;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < args.period; i += gridDim.x * kThreads) {
    const uint32_t channel = i % args.channels;
    const Spread spread = spreadOf(args, channel);
    const bool blank = spread.odd && args.nonfinite == Nonfinite::poison;
    taken &= !spread.odd || args.nonfinite != Nonfinite::error;
    float base = 0, step;
    if (args.centred) {
      const uint64_t rows = args.count / args.channels;
      const float range = rule == GridRule::sign ? meanOf(args.sums[channel], rows, spread.largest)
                          : form.rms             ? 2 * rmsOf(args.sums[channel], rows, spread.largest)
                                                 : floatOf(spread.largest);
      const CentredScale scale = centredScale(range, form);
      step = blank ? floatOf(kPoison) : scale.step;
      args.inverse[i] = scale.inverse;
    } else {
      const AffineScale scale = affineScale(spread.low, spread.high, top, form);
      taken &= scale.fits || blank;
      base = args.base[i] = scale.base;
      args.inverse[i] = scale.inverse;
      step = scale.step;
      if (rule == GridRule::dithered) {
        const float dither = ditherOf(philox(channel, {key.seed, key.stream | kBucketStream, key.step}).word[0]);
        args.magic[i] = 256.0f + dither;
        if (form.shifted) base = shiftedBase(base, step, dither);
      }
      if (blank) {
        base = floatOf(kPoison);
        step = 0;
      }
    }
    args.spare[i] = blank ? kBlanked : spread.largest;
    if (i != channel) continue;
    std::byte* meta = args.meta + uint64_t{i} * (args.centred ? 1 : 2) * (form.bf16 ? 2 : 4);
    if (!args.centred) meta = putScale(meta, base, form.bf16);
    putScale(meta, step, form.bf16);
  }
  if (!taken) *args.refused = 1;  // all who write, write 1
}

// The codes: a warp a block of 512.
template <GridRule kRule, class T>
__global__ void __launch_bounds__(kThreads) encodeChannels(UncutArgs<std::byte> args, const T* x, PhiloxKey key) {
  constexpr bool kAffine = kRule != GridRule::centred && kRule != GridRule::sign;
  const Seat seat = Seat::ofThisThread();
  const uint32_t bits = args.bits, top = (1u << bits) - 1;
  const bool mends = args.nonfinite != Nonfinite::error;
  const uint64_t stride = uint64_t{gridDim.x} * kWarps * kBlock;
  uint64_t start = (uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kBlock;
  for (Rows rows(start, stride, args.period, seat); start < args.count; start += stride, rows.next()) {
    const uint32_t n = elementsOf(start, args.count);
    const Tile tile = loadTile(x + start, n, kBlock, seat);
    uint32_t draw[4] = {};
    if (kRule == GridRule::stochastic) drawTile(draw, start / kBlock, key, seat);
    float base[4] = {}, inverse[4] = {}, magic[4] = {};
    uint32_t spare[4] = {}, field[4] = {};
    uint32_t at = rows.first();
    for (uint32_t r = 0; r < 4; ++r, at = rows.below(at)) {
      if (r == 0 || !rows.alike()) {
        if (kAffine) loadFour(base, args.base + at);
        if (kRule != GridRule::sign) loadFour(inverse, args.inverse + at);
        if (kRule == GridRule::dithered) loadFour(magic, args.magic + at);
        if (mends) loadFour(spare, args.spare + at);
      }
      for (uint32_t c = 0; c < 4; ++c) {
        const float element = tile.at[r][c];
        const float of = mends ? mended(element, spare[c], kFiniteLimitBits) : element;
        uint32_t fixed;
        if (kRule == GridRule::sign) {
          fixed = signFixed(of);
        } else if (kRule == GridRule::centred) {
          fixed = centredFixed(of, inverse[c], args.form);
        } else if (kRule == GridRule::dithered) {
          fixed = gridFixed(of, base[c], inverse[c], magic[c]);
        } else {
          fixed = gridFixed(of, base[c], inverse[c], kRule == GridRule::stochastic ? kStochasticMagic : kNearestMagic);
        }
        if (kRule == GridRule::stochastic) fixed = withDraw(fixed, (draw[c] >> (8 * r)) & 255);
        field[c] |= (mends && spare[c] == kBlanked ? 0 : gridCode(fixed, top)) << (bits * r);
      }
    }
    if (n < kBlock) {
      for (uint32_t c = 0; c < 4; ++c)
        field[c] &= presentBits(c, n, bits, false, seat);
    }
    storeFields(args.words + start / 8 * bits, field, n, bits, seat);
  }
}

// A function a type, chosen by rule.
template <class T>
auto channelsEncoder(GridRule rule) {
  switch (rule) {
    case GridRule::stochastic:
      return encodeChannels<GridRule::stochastic, T>;
    case GridRule::dithered:
      return encodeChannels<GridRule::dithered, T>;
    case GridRule::centred:
      return encodeChannels<GridRule::centred, T>;
    case GridRule::sign:
      return encodeChannels<GridRule::sign, T>;
    default:
      return encodeChannels<GridRule::nearest, T>;
  }
}

template <class T>
void enqueueSpread(const Place& place, const char* doing, const UncutArgs<std::byte>& args, const T* x) {
  // Rows of about 1024 elements or more, so that a tensor of few channels too has enough columns.
  const uint32_t joined = args.period >= 1024 ? 1 : (1023 + args.period) / args.period;
  const uint32_t columns = joined * args.period, tiles = (columns + kSpreadColumns - 1) / kSpreadColumns;
  const uint64_t rows = (args.count + columns - 1) / columns, groups = (rows + kSpreadWarps - 1) / kSpreadWarps;
  const uint64_t slices =
      std::max<uint64_t>(1, std::min<uint64_t>(gridOf(UINT64_MAX, place.device, doing) / 8 / tiles, (groups + 3) / 4));
  check(cudaMemsetAsync(args.low, 0, 12 * uint64_t{args.channels}, place.stream), doing, place.device);
  launch(place, doing, spreadColumns<T>, static_cast<unsigned>(tiles * slices), kSpreadWarps * kWarp, args, x, columns,
         tiles, static_cast<uint32_t>(slices));
}

}  // namespace

template <class T>
void encodeUncutRun(const Place& place, const UncutArgs<std::byte>& args, const T* x, GridRule rule,
                    const PhiloxKey& key) {
  constexpr const char* kDoing = "encode uncut grid";
  const DeviceScope scope(place.device, kDoing);
  enqueueSpread(place, kDoing, args, x);
  if (rule == GridRule::sign || args.form.rms) {
    const uint32_t together = std::min(args.channels, kMostTogether);
    launch(place, kDoing, sumChannels<T>, (args.channels + together - 1) / together, kPartials * together, args, x,
           together, rule != GridRule::sign);
  }
  launch(place, kDoing, scaleChannels, (args.period + kThreads - 1) / kThreads, kThreads, args, rule, key);
  launchByWarps(place, kDoing, channelsEncoder<T>(rule), args.count, args, x, key);
}

}  // namespace lowcomm::cuda

#define LOWCOMM_UNCUT_ENCODE(T)                                                                                  \
  namespace lowcomm::cuda {                                                                                      \
  template void encodeUncutRun(const Place&, const UncutArgs<std::byte>&, const T*, GridRule, const PhiloxKey&); \
  }
