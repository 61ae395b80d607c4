#include "kernels/per_channel/per_channel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/finite.h"
#include "kernels/grid/grid_rules.h"

namespace lowcomm {

// ---- the loops over all elements, to be read next to FORMAT.md "Channels"; one form, for no setting that a page
// recommends has a scale a channel ----

namespace {

constexpr size_t kLanes = 16;
constexpr size_t kBlock = 512;

// f(a row of scales' worth of elements, how many, its first element's number).
template <typename F>
void eachRow(const float* x, size_t count, size_t period, F&& f) {
  for (size_t e = 0; e < count; e += period)
    f(x + e, std::min(period, count - e), e);
}

// Least and largest element, and largest magnitude's bits, of the elements whose index is i modulo `period`.
void range(float* low, float* high, const float* x, size_t count, size_t period) {
  eachRow(x, count, period, [&](const float* row, size_t n, size_t) {
    for (size_t i = 0; i < n; ++i) {
      low[i] = row[i] < low[i] ? row[i] : low[i];
      high[i] = row[i] > high[i] ? row[i] : high[i];
    }
  });
}

void largestBits(uint32_t* largest, const float* x, size_t count, size_t period) {
  eachRow(x, count, period, [&](const float* row, size_t n, size_t) {
    for (size_t i = 0; i < n; ++i)
      largest[i] = std::max(largest[i], floatBits(row[i]) & 0x7fffffffu);
  });
}

// sums[e mod length] += |y|, or y·y, y = x[e]·down[e mod period], in ascending order; length is a multiple of period.
void addSums(float* sums, size_t length, const float* x, const float* down, size_t count, size_t period, bool squares) {
  eachRow(x, count, period, [&](const float* row, size_t n, size_t first) {
    float* to = sums + first % length;
    for (size_t i = 0; i < n; ++i) {
      const float y = row[i] * down[i];
      to[i] += squares ? y * y : std::fabs(y);
    }
  });
}

// The byte of an element, of the call that serves its lane and 16 rows.
uint32_t drawOf(size_t e, const PhiloxKey& key) {
  const size_t row = e % kBlock / kLanes;
  const PhiloxWords out = philox((e / kBlock * 2 + row / 16) * kLanes + e % kLanes, key);
  return out.word[row % 16 / 4] >> (8 * (row % 4)) & 255u;
}

uint32_t fixedOf(float x, size_t i, const ChannelScales& scales, const GridForm& form, GridRule rule) {
  if (rule == GridRule::sign) return kFixedExponent | signFixed(x);
  if (rule == GridRule::centred) return centredFixed(x, scales.inverse[i], form);
  const float magic = scales.magic ? scales.magic[i] : rule == GridRule::stochastic ? kStochasticMagic : kNearestMagic;
  return gridFixed(x, scales.base[i], scales.inverse[i], magic);
}

// The codes of all elements to `words`. False when an element is NaN or infinite (not found around 0).
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

// y[e] = base + step·code, around 0 (code - base)·step, or y[e] += that.
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

// ---- a tensor: scales of its channels, then its codes ----

// The number of elements after which a row of scales repeats (ChannelScales).
size_t periodOf(size_t channels) {
  return std::lcm(channels, size_t{16});
}

// One value a channel, repeated over the period.
std::vector<float> repeated(std::vector<float> of_channels, size_t period) {
  const size_t channels = of_channels.size();
  of_channels.resize(period);
  for (size_t i = channels; i < period; ++i)
    of_channels[i] = of_channels[i - channels];
  return of_channels;
}

// A channel's share of a statistic that was taken over the period.
template <typename T, typename F>
void fold(std::vector<T>& of_period, size_t channels, F&& better) {
  for (size_t i = channels; i < of_period.size(); ++i) {
    T& to = of_period[i % channels];
    if (better(of_period[i], to)) to = of_period[i];
  }
  of_period.resize(channels);
}

std::vector<uint32_t> largestOf(const float* x, size_t count, size_t channels) {
  std::vector<uint32_t> largest(periodOf(channels), 0);
  largestBits(largest.data(), x, count, largest.size());
  return largest;
}

void foldLargest(std::vector<uint32_t>& largest, size_t channels) {
  fold(largest, channels, [](uint32_t a, uint32_t b) { return a > b; });
}

// Sum of |y| or of y·y over each channel, in the order that FORMAT.md fixes: its element t into partial sum t mod 64.
std::vector<float> sumsOf(const float* x, size_t count, const std::vector<uint32_t>& largest, bool squares) {
  const size_t channels = largest.size(), period = periodOf(channels), length = 64 * channels;
  std::vector<float> down(channels), partial(length, 0.0f);
  for (size_t c = 0; c < channels; ++c)
    down[c] = scaleDown(largest[c]);
  down = repeated(std::move(down), period);
  addSums(partial.data(), length, x, down.data(), count, period, squares);
  for (size_t half = 32; half > 0; half /= 2) {
    for (size_t i = 0; i < half * channels; ++i)
      partial[i] += partial[i + half * channels];
  }
  partial.resize(channels);
  return partial;
}

// The scales of codecs whose ranges are sums, which are computed from x.
bool scalesOfSums(std::byte* meta, std::vector<float>& inverse, std::vector<uint32_t> largest, const float* x,
                  size_t count, size_t channels, const GridForm& form, bool mean) {
  foldLargest(largest, channels);
  for (uint32_t bits_of_largest : largest) {
    if (bits_of_largest >= floatBits(kFiniteLimit)) return false;
  }
  const std::vector<float> sums = sumsOf(x, count, largest, !mean);
  const size_t each = count / channels;
  inverse.resize(channels);
  for (size_t c = 0; c < channels; ++c) {
    const float s = mean ? meanOf(sums[c], each, largest[c]) : 2 * rmsOf(sums[c], each, largest[c]);
    const CentredScale scale = centredScale(s, form);
    inverse[c] = scale.inverse;
    meta = putScale(meta, scale.step, form.bf16);
  }
  inverse = repeated(std::move(inverse), periodOf(channels));
  return true;
}

// Metadata and what elements are multiplied by, where a channel's range is its largest magnitude. False when an element
// is refused.
bool scalesOfLargest(std::byte* meta, std::vector<float>& inverse, std::vector<uint32_t> largest, size_t channels,
                     const GridForm& form) {
  foldLargest(largest, channels);
  inverse.resize(channels);
  for (size_t c = 0; c < channels; ++c) {
    if (largest[c] >= floatBits(kFiniteLimit)) return false;
    const CentredScale scale = centredScale(floatOf(largest[c]), form);
    inverse[c] = scale.inverse;
    meta = putScale(meta, scale.step, form.bf16);
  }
  inverse = repeated(std::move(inverse), periodOf(channels));
  return true;
}

bool encodeCentred(std::byte* meta, std::byte* words, const float* x, size_t count, size_t channels,
                   const GridForm& form, GridRule rule, int bits, const PhiloxKey& key) {
  std::vector<uint32_t> largest = largestOf(x, count, channels);
  std::vector<float> inverse;
  const bool mean = rule == GridRule::sign;
  const bool taken = mean || form.rms ? scalesOfSums(meta, inverse, std::move(largest), x, count, channels, form, mean)
                                      : scalesOfLargest(meta, inverse, std::move(largest), channels, form);
  if (!taken) return false;
  return encode(words, x, count, {nullptr, inverse.data(), nullptr, inverse.size()}, form, rule, bits, key);
}

// The numbers that codes are decoded with: base, or centre, and step.
void decodingScales(std::vector<float>& base, std::vector<float>& step, const std::byte* meta, size_t channels,
                    const GridForm& form, bool centred) {
  base.assign(channels, form.centre);
  step.resize(channels);
  for (size_t c = 0; c < channels; ++c) {
    step[c] = centred ? scaleAt(meta, c, form.bf16) * form.unit : scaleAt(meta, 2 * c + 1, form.bf16);
    if (!centred) base[c] = scaleAt(meta, 2 * c, form.bf16);
  }
  base = repeated(std::move(base), periodOf(channels));
  step = repeated(std::move(step), periodOf(channels));
}

}  // namespace

bool encodeChannels(std::byte* meta, std::byte* words, const float* x, size_t count, size_t channels,
                    const GridForm& form, GridRule rule, int bits, const PhiloxKey& key) {
  if (rule == GridRule::centred || rule == GridRule::sign) {
    return encodeCentred(meta, words, x, count, channels, form, rule, bits, key);
  }
  const size_t period = periodOf(channels);
  const float levels = static_cast<float>((1u << bits) - 1);
  std::vector<float> low(period, std::numeric_limits<float>::infinity()), high(period, -low[0]);
  range(low.data(), high.data(), x, count, period);
  fold(low, channels, [](float a, float b) { return a < b; });
  fold(high, channels, [](float a, float b) { return a > b; });

  std::vector<float> base(channels), inverse(channels), magic;
  if (rule == GridRule::dithered) magic.resize(channels);
  for (size_t c = 0; c < channels; ++c) {
    if (!(low[c] > -kFiniteLimit && high[c] < kFiniteLimit)) return false;
    const AffineScale scale = affineScale(low[c], high[c], levels, form);
    base[c] = scale.base;
    inverse[c] = scale.inverse;
    float sent = scale.base;
    if (rule == GridRule::dithered) {
      const float dither = ditherOf(philox(c, {key.seed, key.stream | kBucketStream, key.step}).word[0]);
      magic[c] = 256.0f + dither;
      sent = shiftedBase(sent, scale.step, dither);
    }
    meta = putScale(putScale(meta, sent, form.bf16), scale.step, form.bf16);
  }
  base = repeated(std::move(base), period);
  inverse = repeated(std::move(inverse), period);
  if (!magic.empty()) magic = repeated(std::move(magic), period);
  const ChannelScales scales{base.data(), inverse.data(), magic.empty() ? nullptr : magic.data(), period};
  return encode(words, x, count, scales, form, rule, bits, key);
}

void decodeChannels(float* y, const std::byte* meta, const std::byte* words, size_t count, size_t channels,
                    const GridForm& form, bool centred, bool add, int bits) {
  std::vector<float> base, step;
  decodingScales(base, step, meta, channels, form, centred);
  decode(y, words, count, base.data(), step.data(), base.size(), centred, add, bits);
}

}  // namespace lowcomm
