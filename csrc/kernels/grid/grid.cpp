// The reference: what every other form of these loops must equal, bit for bit. Written to be read next to FORMAT.md
// "Grid codecs"; a machine without a vector form runs it.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/narrow_float.h"
#include "kernels/codebook/codebook.h"
#include "kernels/finite.h"
#include "kernels/grid/grid_rules.h"
#include "kernels/isa/table.h"
#include "kernels/philox.h"

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

// Bits of the largest |x|: NaN is above infinity, infinity above all numbers.
uint32_t largestOf(const float* x, size_t count) {
  uint32_t largest = 0;
  for (size_t i = 0; i < count; ++i)
    largest = std::max(largest, floatBits(x[i]) & 0x7fffffffu);
  return largest;
}

// Sum of |y| or of y·y over y = x·2^-E, in the order that FORMAT.md fixes.
float sumOf(const float* x, size_t count, uint32_t largest, bool squares) {
  float partial[64] = {};
  for (size_t i = 0; i < count; ++i) {
    const float y = x[i] * scaleDown(largest);
    const float term = squares ? y * y : std::fabs(y);
    partial[i % 64] += term;
  }
  for (size_t half = 32; half > 0; half /= 2) {
    for (size_t k = 0; k < half; ++k)
      partial[k] += partial[k + half];
  }
  return partial[0];
}

// `counted` of the elements enter a mean.
template <GridRule kRule>
float centredRange(const float* x, size_t count, size_t counted, uint32_t largest, const GridForm& form) {
  if (kRule == GridRule::sign) return meanOf(sumOf(x, count, largest, false), counted, largest);
  return form.rms ? 2 * rmsOf(sumOf(x, count, largest, true), counted, largest) : floatOf(largest);
}

// Thresholds strictly below t.
uint32_t codeIn(const Codebook& book, float t) {
  const float* end = book.threshold + (size_t{1} << book.bits) - 1;
  return static_cast<uint32_t>(std::lower_bound(book.threshold, end, t) - book.threshold);
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
  float magic = kStochastic ? kStochasticMagic : kNearestMagic;
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
        scale = affineScale(range.low, range.high, kRule == GridRule::levels ? 1 : static_cast<float>(kTop), form);
        float base = scale.base;
        if (kRule == GridRule::dithered) {
          const float dither = drawBucket(first_bucket + bucket, key);
          magic = 256.0f + dither;
          base = shiftedBase(base, scale.step, dither);
        }
        meta = putScale(putScale(meta, base, form.bf16), scale.step, form.bf16);
      }
      uint32_t fixed = gridFixed(x[e], scale.base, scale.inverse, magic);
      taken &= isFixed(fixed);
      if (kStochastic) fixed = withDraw(fixed, draws[i / kLanes][i % kLanes]);
      const uint32_t code = kRule == GridRule::levels
                                ? codeIn(*form.book, gridQuotient(x[e], scale.base, scale.inverse))
                                : gridCode(fixed, kTop);
      codes[i / kLanes][i % kLanes] = static_cast<uint8_t>(code);
    }
    packBlock(words + start / 8 * kBits, codes, kBits, wordsALane(n, kBits));
  }
  return taken;
}

template <int kBits, GridRule kRule>
bool encodeCentred(std::byte* meta, std::byte* words, const float* x, size_t count, const GridForm& form, uint64_t,
                   const PhiloxKey&) {
  constexpr uint32_t kTop = (1u << kBits) - 1;
  CentredScale scale{};
  uint8_t codes[kRows][kLanes];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t n = std::min(kBlock, count - start);
    std::memset(codes, 0, sizeof(codes));
    for (size_t i = 0; i < n; ++i) {
      const size_t e = start + i;
      if (e % form.bucket == 0) {
        const size_t size = std::min<size_t>(form.bucket, count - e);
        const uint32_t largest = largestOf(x + e, size);
        if (largest >= kFiniteLimitBits) return false;
        const size_t counted = e + size == count ? size - form.absent : size;
        scale = centredScale(centredRange<kRule>(x + e, size, counted, largest, form), form);
        meta = putScale(meta, scale.step, form.bf16);
      }
      const uint32_t fixed = kRule == GridRule::gauss  ? codeIn(*form.book, x[e] * scale.inverse) << 15
                             : kRule == GridRule::sign ? signFixed(x[e])
                                                       : centredFixed(x[e], scale.inverse, form);
      codes[i / kLanes][i % kLanes] = static_cast<uint8_t>(gridCode(fixed, kTop));
    }
    packBlock(words + start / 8 * kBits, codes, kBits, wordsALane(n, kBits));
  }
  return true;
}

template <GridValue kValue>
float valueOf(float base, float step, uint32_t code, const GridForm& form) {
  switch (kValue) {
    case GridValue::affine:
      return gridValue(base, step, code);
    case GridValue::centred:
      return centredValue(form.centre, step, code);
    case GridValue::levels:
      return levelsValue(base, step, form.book->level[code]);
    case GridValue::gauss:
      return gaussValue(form.book->level[code], step, form.gain);
  }
}

template <int kBits, bool kAdd, GridValue kValue>
void decodeGrid(float* y, const std::byte* meta, const std::byte* words, size_t count, const GridForm& form) {
  constexpr uint32_t kTop = (1u << kBits) - 1;
  constexpr bool kCentred = kValue == GridValue::centred || kValue == GridValue::gauss;
  float base = 0, step = 0;
  for (size_t e = 0; e < count; ++e) {
    if (e % form.bucket == 0) {
      if (kCentred) {
        step = scaleAt(meta, e / form.bucket, form.bf16) * form.unit;
      } else {
        base = scaleAt(meta, e / form.bucket * 2, form.bf16);
        step = scaleAt(meta, e / form.bucket * 2 + 1, form.bf16);
      }
    }
    const size_t bit = e % kBlock / kLanes * kBits;
    const std::byte* lane = words + e / kBlock * (kBlock / 8) * kBits + (bit / 32 * kLanes + e % kLanes) * 4;
    uint32_t low, high = 0;
    std::memcpy(&low, lane, 4);
    if (bit % 32 + kBits > 32) std::memcpy(&high, lane + kLanes * 4, 4);
    const uint32_t code = static_cast<uint32_t>(((uint64_t{high} << 32) | low) >> (bit % 32)) & kTop;
    const float value = valueOf<kValue>(base, step, code, form);
    y[e] = kAdd ? y[e] + value : value;
  }
}

template <bool kMinus>
void combine(float* out, const float* a, const float* b, size_t count) {
  for (size_t i = 0; i < count; ++i)
    out[i] = kMinus ? a[i] - b[i] : a[i] + b[i];
}

#define LOWCOMM_ENCODE(b)                                                                                    \
  {encodeGrid<b, GridRule::nearest>, encodeGrid<b, GridRule::stochastic>, encodeGrid<b, GridRule::dithered>, \
   encodeCentred<b, GridRule::centred>, b == 1 ? encodeCentred<1, GridRule::sign> : nullptr}
#define LOWCOMM_DECODE_AS(b, value) {decodeGrid<b, false, GridValue::value>, decodeGrid<b, true, GridValue::value>}
#define LOWCOMM_DECODE(b) LOWCOMM_DECODE_AS(b, affine)
#define LOWCOMM_DECODE_CENTRED(b) LOWCOMM_DECODE_AS(b, centred)
#define LOWCOMM_ENCODE_BY_BOOK(b) {encodeGrid<b, GridRule::levels>, encodeCentred<b, GridRule::gauss>}
#define LOWCOMM_DECODE_BY_BOOK(b) {LOWCOMM_DECODE_AS(b, levels), LOWCOMM_DECODE_AS(b, gauss)}
#define LOWCOMM_EACH_WIDTH(loops) {loops(1), loops(2), loops(3), loops(4), loops(5), loops(6), loops(7), loops(8)}
}  // namespace

namespace scalar {

constexpr CodebookLoops kCodebooks = {
    LOWCOMM_EACH_WIDTH(LOWCOMM_ENCODE_BY_BOOK), LOWCOMM_EACH_WIDTH(LOWCOMM_DECODE_BY_BOOK), {}, {}};

constexpr KernelTable kTable = {
    "scalar",
    LOWCOMM_EACH_WIDTH(LOWCOMM_ENCODE),
    LOWCOMM_EACH_WIDTH(LOWCOMM_DECODE),
    LOWCOMM_EACH_WIDTH(LOWCOMM_DECODE_CENTRED),
    &kCodebooks,
    &kRotation,
    halvesToFloats,
    floatsToHalves,
    brainsToFloats,
    floatsToBrains,
    combine<false>,
    combine<true>,
    &kCasts,
    &kSelect,
    &kNoise,
    &kLowRank,
};

}  // namespace scalar

}  // namespace lowcomm
