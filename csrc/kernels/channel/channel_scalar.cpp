// The reference of the loops over channels, to be read beside FORMAT.md "Channels".
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "base/half.h"
#include "kernels/channel/channel.h"
#include "kernels/grid/grid_rules.h"
#include "kernels/isa/table.h"

namespace lowcomm {
namespace {

constexpr size_t kLanes = 16;
constexpr size_t kBlock = 512;

void range(float* low, float* high, const float* x, size_t count, size_t period) {
  for (size_t e = 0; e < count; ++e) {
    const size_t i = e % period;
    low[i] = x[e] < low[i] ? x[e] : low[i];
    high[i] = x[e] > high[i] ? x[e] : high[i];
  }
}

void largest(uint32_t* largest, const float* x, size_t count, size_t period) {
  for (size_t e = 0; e < count; ++e)
    largest[e % period] = std::max(largest[e % period], floatBits(x[e]) & 0x7fffffffu);
}

void sums(float* sums, size_t length, const float* x, const float* down, size_t count, size_t period, bool squares) {
  for (size_t e = 0; e < count; ++e) {
    const float y = x[e] * down[e % period];
    const float term = squares ? y * y : std::fabs(y);
    sums[e % length] += term;
  }
}

// The byte of an element, of the call that serves its lane and 16 rows.
uint32_t drawOf(size_t e, const PhiloxKey& key) {
  const size_t row = e % kBlock / kLanes;
  const PhiloxWords out = philox((e / kBlock * 2 + row / 16) * kLanes + e % kLanes, key);
  return out.word[row % 16 / 4] >> (8 * (row % 4)) & 255u;
}

uint32_t fixedOf(float x, size_t i, const ChannelScales& scales, const GridForm& form, GridRule rule) {
  if (rule == GridRule::sign) return kFixedExponent | (x >= 0 ? 1u << 15 : 0);
  if (rule == GridRule::centred) {
    float t = x * scales.inverse[i];
    t = t < form.low ? form.low : t;
    t = form.high < t ? form.high : t;
    return floatBits(t + form.magic);
  }
  const float magic = scales.magic ? scales.magic[i] : rule == GridRule::stochastic ? kStochasticMagic : kNearestMagic;
  return gridFixed(x, scales.base[i], scales.inverse[i], magic);
}

bool encode(std::byte* words, const float* x, size_t count, const ChannelScales& scales, const GridForm& form,
            GridRule rule, int bits, const PhiloxKey& key) {
  const size_t width = static_cast<size_t>(bits), rows = (count % kBlock + kLanes - 1) / kLanes;
  std::memset(words, 0, 64 * (count / kBlock * width + (rows * width + 31) / 32));
  bool taken = true;
  for (size_t e = 0; e < count; ++e) {
    uint32_t fixed = fixedOf(x[e], e % scales.period, scales, form, rule);
    taken &= isFixed(fixed);
    if (rule == GridRule::stochastic) fixed = withDraw(fixed, drawOf(e, key));
    const uint64_t code = gridCode(fixed, (1u << bits) - 1);
    const size_t bit = e % kBlock / kLanes * width;
    std::byte* lane = words + e / kBlock * 64 * width + (bit / 32 * kLanes + e % kLanes) * 4;
    for (uint64_t placed = code << bit % 32; placed != 0; placed >>= 32, lane += 64) {
      uint32_t word;
      std::memcpy(&word, lane, 4);
      word |= static_cast<uint32_t>(placed);
      std::memcpy(lane, &word, 4);
    }
  }
  return taken;
}

void decode(float* y, const std::byte* words, size_t count, const float* base, const float* step, size_t period,
            bool centred, bool add, int bits) {
  const size_t width = static_cast<size_t>(bits);
  for (size_t e = 0; e < count; ++e) {
    const size_t bit = e % kBlock / kLanes * width, i = e % period;
    const std::byte* lane = words + e / kBlock * 64 * width + (bit / 32 * kLanes + e % kLanes) * 4;
    uint32_t low, high = 0;
    std::memcpy(&low, lane, 4);
    if (bit % 32 + width > 32) std::memcpy(&high, lane + 64, 4);
    const uint32_t code = static_cast<uint32_t>(((uint64_t{high} << 32) | low) >> (bit % 32)) & ((1u << bits) - 1);
    const float value = centred ? (static_cast<float>(code) - base[i]) * step[i] : gridValue(base[i], step[i], code);
    y[e] = add ? y[e] + value : value;
  }
}

}  // namespace

namespace scalar {
constexpr ChannelKernels kChannels = {range, largest, sums, encode, decode};
}  // namespace scalar

}  // namespace lowcomm
