// The reference: what every other form of these loops must equal, bit for bit. Written to be read beside FORMAT.md
// "Grid codecs"; a machine without a vector form runs it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/grid_rules.h"
#include "kernels/half.h"
#include "kernels/philox.h"
#include "kernels/table.h"

namespace lowcomm {

namespace {

constexpr size_t kLanes = 16;
constexpr size_t kRows = 32;
constexpr size_t kBlock = kLanes * kRows;

GridScale scaleOf(const float* x, size_t count, float levels) {
  float low = x[0], high = x[0];
  for (size_t i = 1; i < count; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  return gridScale(low, high, levels);
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

template <int kBits, bool kStochastic>
bool encodeGrid(std::byte* meta, std::byte* words, const float* x, size_t count, uint32_t bucket, uint64_t block,
                const PhiloxKey& key) {
  constexpr uint32_t kTop = (1u << kBits) - 1;
  constexpr float kMagic = kStochastic ? kStochasticMagic : kNearestMagic;
  bool finite = true;
  GridScale grid{};
  uint8_t codes[kRows][kLanes];
  uint8_t draws[kRows][kLanes];
  for (size_t start = 0; start < count; start += kBlock, ++block) {
    const size_t n = std::min(kBlock, count - start);
    std::memset(codes, 0, sizeof(codes));
    if (kStochastic) drawBlock(draws, block, key);
    for (size_t i = 0; i < n; ++i) {
      const size_t e = start + i;
      if (e % bucket == 0) {
        grid = scaleOf(x + e, std::min<size_t>(bucket, count - e), static_cast<float>(kTop));
        std::memcpy(meta + e / bucket * 8, &grid.base, 4);
        std::memcpy(meta + e / bucket * 8 + 4, &grid.step, 4);
        finite &= grid.finite;
      }
      uint32_t fixed = gridFixed(x[e], grid.base, grid.inverse, kMagic);
      finite &= isFixed(fixed);
      if (kStochastic) fixed = withDraw(fixed, draws[i / kLanes][i % kLanes]);
      codes[i / kLanes][i % kLanes] = static_cast<uint8_t>(gridCode(fixed, kTop));
    }
    packBlock(words + start / 8 * kBits, codes, kBits, wordsALane(n, kBits));
  }
  return finite;
}

template <int kBits, bool kAdd>
void decodeGrid(float* y, const std::byte* meta, const std::byte* words, size_t count, uint32_t bucket) {
  constexpr uint32_t kTop = (1u << kBits) - 1;
  float base = 0, step = 0;
  for (size_t e = 0; e < count; ++e) {
    if (e % bucket == 0) {
      std::memcpy(&base, meta + e / bucket * 8, 4);
      std::memcpy(&step, meta + e / bucket * 8 + 4, 4);
    }
    const size_t bit = e % kBlock / kLanes * kBits;
    const std::byte* lane = words + e / kBlock * (kBlock / 8) * kBits + (bit / 32 * kLanes + e % kLanes) * 4;
    uint32_t low, high = 0;
    std::memcpy(&low, lane, 4);
    if (bit % 32 + kBits > 32) std::memcpy(&high, lane + kLanes * 4, 4);
    const uint32_t code = static_cast<uint32_t>(((uint64_t{high} << 32) | low) >> (bit % 32)) & kTop;
    const float value = gridValue(base, step, code);
    y[e] = kAdd ? y[e] + value : value;
  }
}

template <auto kConvert, typename To, typename From>
void convertAll(To* y, const From* x, size_t count) {
  for (size_t i = 0; i < count; ++i)
    y[i] = kConvert(x[i]);
}

#define LOWCOMM_ENCODE(b) {encodeGrid<b, false>, encodeGrid<b, true>}
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
