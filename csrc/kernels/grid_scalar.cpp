// The reference: what every other form of these loops must equal, bit for bit. Written to be read beside FORMAT.md
// "Grid codecs"; a machine without a vector form runs it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/finite.h"
#include "kernels/grid_scale.h"
#include "kernels/half.h"
#include "kernels/philox.h"
#include "kernels/table.h"

namespace lowcomm {

namespace {

constexpr size_t kLanes = 16;
constexpr size_t kRows = 32;
constexpr size_t kBlock = kLanes * kRows;

struct Range {
  float low, high;
};

Range rangeOf(const float* x, size_t count) {
  Range range{x[0], x[0]};
  for (size_t i = 1; i < count; ++i) {
    range.low = x[i] < range.low ? x[i] : range.low;
    range.high = x[i] > range.high ? x[i] : range.high;
  }
  return range;
}

// The random number of a bucket, of which bucket 0 starts the tensor's block 0.
float drawBucket(uint64_t bucket, const PhiloxKey& key) {
  return ditherOf(philox(bucket, {key.seed, key.stream | kBucketStream, key.step}).word[0]);
}

// The random byte of every element of a block, [row][lane].
void drawBlock(uint8_t (*draws)[kLanes], uint64_t block, const PhiloxKey& key) {
  for (size_t half = 0; half < 2; ++half) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const PhiloxWords out = philox((block * 2 + half) * kLanes + lane, key);
      for (size_t j = 0; j < 16; ++j) {
        draws[half * 16 + j][lane] = static_cast<uint8_t>(out.word[j / 4] >> (8 * (j % 4)));
      }
    }
  }
}

// Codes of a block (0 past its last element) into `words_a_lane` words of each of the 16 lanes.
void packBlock(std::byte* words, const uint8_t (*codes)[kLanes], int bits, size_t words_a_lane) {
  for (size_t lane = 0; lane < kLanes; ++lane) {
    uint64_t pending = 0;
    int filled = 0;
    size_t word = 0;
    for (size_t row = 0; word < words_a_lane; ++row) {
      pending |= uint64_t{codes[row][lane]} << filled;
      filled += bits;
      // The last word of a short block may not fill up: rows past it are 0, so going on costs nothing but the loop.
      if (filled >= 32) {
        const uint32_t out = static_cast<uint32_t>(pending);
        std::memcpy(words + (word++ * kLanes + lane) * 4, &out, 4);
        pending >>= 32;
        filled -= 32;
      }
    }
  }
}

size_t wordsALane(size_t elements, int bits) {
  const size_t rows = (elements + kLanes - 1) / kLanes;
  return (rows * static_cast<size_t>(bits) + 31) / 32;
}

template <int kBits, GridRule kRule>
bool encodeGrid(std::byte* meta, std::byte* words, const float* x, size_t count, const GridForm& form, uint64_t block,
                const PhiloxKey& key) {
  constexpr uint32_t kTop = (1u << kBits) - 1;
  constexpr bool kStochastic = kRule == GridRule::stochastic;
  const uint64_t first_bucket = block * kBlock / form.bucket;
  bool taken = true;
  AffineScale scale{};
  float magic = kStochastic ? 256.0f : 256.5f;
  uint8_t codes[kRows][kLanes];
  uint8_t draws[kRows][kLanes];
  for (size_t start = 0; start < count; start += kBlock, ++block) {
    const size_t n = std::min(kBlock, count - start);
    std::memset(codes, 0, sizeof(codes));
    if (kStochastic) drawBlock(draws, block, key);
    for (size_t i = 0; i < n; ++i) {
      const size_t e = start + i;
      if (e % form.bucket == 0) {
        const size_t bucket = e / form.bucket;
        const Range range = rangeOf(x + e, std::min<size_t>(form.bucket, count - e));
        taken &= range.low > -kFiniteLimit && range.high < kFiniteLimit;
        scale = affineScale(range.low, range.high, static_cast<float>(kTop), form);
        taken &= scale.fits;
        float base = scale.base;
        if (kRule == GridRule::dithered) {
          const float dither = drawBucket(first_bucket + bucket, key);
          magic = 256.0f + dither;
          if (form.shifted) base = shiftedBase(base, scale.step, dither);
        }
        std::memcpy(meta + bucket * 8, &base, 4);
        std::memcpy(meta + bucket * 8 + 4, &scale.step, 4);
      }
      const float scaled = (x[e] - scale.base) * scale.inverse;
      uint32_t fixed = floatBits(scaled + magic);
      taken &= (fixed >> 23) == 0x87;  // 256 <= value < 512: only NaN and infinity fall out
      if (kStochastic) fixed += (uint32_t{draws[i / kLanes][i % kLanes]} << 7) + 64;
      codes[i / kLanes][i % kLanes] = static_cast<uint8_t>((fixed >> 15) & kTop);
    }
    packBlock(words + start / 8 * kBits, codes, kBits, wordsALane(n, kBits));
  }
  return taken;
}

template <int kBits, bool kAdd>
void decodeGrid(float* y, const std::byte* meta, const std::byte* words, size_t count, const GridForm& form) {
  constexpr uint32_t kTop = (1u << kBits) - 1;
  float base = 0, step = 0;
  for (size_t e = 0; e < count; ++e) {
    if (e % form.bucket == 0) {
      std::memcpy(&base, meta + e / form.bucket * 8, 4);
      std::memcpy(&step, meta + e / form.bucket * 8 + 4, 4);
    }
    const size_t bit = e % kBlock / kLanes * kBits;
    const std::byte* lane = words + e / kBlock * (kBlock / 8) * kBits + (bit / 32 * kLanes + e % kLanes) * 4;
    uint32_t low, high = 0;
    std::memcpy(&low, lane, 4);
    if (bit % 32 + kBits > 32) std::memcpy(&high, lane + kLanes * 4, 4);
    const uint32_t code = static_cast<uint32_t>(((uint64_t{high} << 32) | low) >> (bit % 32)) & kTop;
    const float scaled = step * static_cast<float>(code);
    const float value = base + scaled;
    y[e] = kAdd ? y[e] + value : value;
  }
}

template <auto kConvert, typename To, typename From>
void convertAll(To* y, const From* x, size_t count) {
  for (size_t i = 0; i < count; ++i)
    y[i] = kConvert(x[i]);
}

#define LOWCOMM_ENCODE(b) \
  {encodeGrid<b, GridRule::nearest>, encodeGrid<b, GridRule::stochastic>, encodeGrid<b, GridRule::dithered>}
#define LOWCOMM_DECODE(b) {decodeGrid<b, false>, decodeGrid<b, true>}
constexpr KernelTable kTable = {
    "scalar",
    {LOWCOMM_ENCODE(1), LOWCOMM_ENCODE(2), LOWCOMM_ENCODE(3), LOWCOMM_ENCODE(4), LOWCOMM_ENCODE(5), LOWCOMM_ENCODE(6),
     LOWCOMM_ENCODE(7), LOWCOMM_ENCODE(8)},
    {LOWCOMM_DECODE(1), LOWCOMM_DECODE(2), LOWCOMM_DECODE(3), LOWCOMM_DECODE(4), LOWCOMM_DECODE(5), LOWCOMM_DECODE(6),
     LOWCOMM_DECODE(7), LOWCOMM_DECODE(8)},
    convertAll<float16ToFloat>,
    convertAll<floatToFloat16>,
    convertAll<bfloat16ToFloat>,
    convertAll<floatToBfloat16>,
};
#undef LOWCOMM_ENCODE
#undef LOWCOMM_DECODE

}  // namespace

const KernelTable* scalarKernels() {
  return &kTable;
}

}  // namespace lowcomm
