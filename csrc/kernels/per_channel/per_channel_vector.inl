// The loops of channel.cpp on the vectors of lanes.inl, compiled once an instruction set. Codes go through a
// block's worth of memory between quantizing and packing: one form of each a rule and a width, not one a pair.

#include <cstddef>
#include <cstdint>

#include "kernels/finite.h"
#include "kernels/grid/grid_rules.h"
#include "kernels/isa/table.h"
#include "kernels/per_channel/per_channel.h"
//
#include "kernels/isa/lanes.inl"
//
#include "kernels/isa/philox_vector.inl"

namespace lowcomm {
namespace {

constexpr size_t kBlock = 512;
constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr size_t kAhead = 8192;  // bytes prefetched ahead

// Calls `step(elements, their place in the period, how many)` for every register's worth; the last
// one may be short and is padded with zeros.
template <typename F>
LOWCOMM_INLINE void eachRegister(const float* x, size_t count, size_t period, F&& step) {
  size_t place = 0, e = 0;
  for (; e + kLanes <= count; e += kLanes) {
    __builtin_prefetch(reinterpret_cast<const char*>(x + e) + kAhead);
    step(x + e, place, size_t{kLanes});
    place += kLanes;
    if (place == period) place = 0;
  }
  if (e == count) return;
  float rest[kLanes] = {};
  __builtin_memcpy(rest, x + e, (count - e) * sizeof(float));
  step(rest, place, count - e);
}

void range(float* low, float* high, const float* x, size_t count, size_t period) {
  eachRegister(x, count, period, [&](const float* from, size_t place, size_t lanes) {
    if (lanes < kLanes) {
      for (size_t i = 0; i < lanes; ++i) {
        low[place + i] = from[i] < low[place + i] ? from[i] : low[place + i];
        high[place + i] = from[i] > high[place + i] ? from[i] : high[place + i];
      }
      return;
    }
    const Floats v = load(from), l = load(low + place), h = load(high + place);
    store(low + place, v < l ? v : l);
    store(high + place, v > h ? v : h);
  });
}

// Zeros change neither a largest magnitude nor a sum of magnitudes.
void largest(uint32_t* largest, const float* x, size_t count, size_t period) {
  eachRegister(x, count, period, [&](const float* from, size_t place, size_t) {
    const Integers v = (Integers)(loadWords(from) & kMagnitude), l = (Integers)loadWords(largest + place);
    storeWords(largest + place, (Words)(v > l ? v : l));
  });
}

void sums(float* sums, size_t length, const float* x, const float* down, size_t count, size_t period, bool squares) {
  size_t to = 0;
  eachRegister(x, count, period, [&](const float* from, size_t place, size_t) {
    const Floats y = load(from) * load(down + place);
    const Floats term = squares ? y * y : (Floats)((Words)y & kMagnitude);
    store(sums + to, load(sums + to) + term);
    to += kLanes;
    if (to == length) to = 0;
  });
}

// The fixed-point values of one block, rows of 16; `place` moves on. Returns `seen` OR all of them.
template <GridRule kRule>
LOWCOMM_INLINE Words quantize(uint32_t* fixed_values, const float* x, size_t& place, uint64_t block,
                              const ChannelScales& scales, const GridForm& form, const PhiloxKey& key, Words seen) {
  constexpr bool kStochastic = kRule == GridRule::stochastic;
  // Half a random unit (64) rides on the constant, as in grid_vector.inl.
  const Floats same_magic = splat(kStochastic ? 256.001953125f : kRule == GridRule::centred ? form.magic : 256.5f);
  const Floats lowest_t = splat(form.low), highest_t = splat(form.high);
  const PhiloxConstants constants = philoxConstants(block * 32, key);
  Words draws[kRegistersARow][4];
  for (size_t row = 0; row < 32; ++row) {
    if (kStochastic && row % 16 == 0) {
      for (size_t part = 0; part < kRegistersARow; ++part)
        philoxOfBlock(draws[part], constants, (block * 2 + row / 16) * 16 + part * kLanes);
    }
    for (size_t part = 0; part < kRegistersARow; ++part) {
      const size_t at = row * 16 + part * kLanes;
      const Floats element = load(x + at);
      Words fixed;
      if constexpr (kRule == GridRule::sign) {
        fixed = (Words)(element >= Floats{}) & (1u << 15);
      } else if constexpr (kRule == GridRule::centred) {
        Floats t = element * load(scales.inverse + place);
        t = t < lowest_t ? lowest_t : t;
        t = highest_t < t ? highest_t : t;
        fixed = (Words)(t + same_magic);
      } else {
        const Floats magic = kRule == GridRule::dithered ? load(scales.magic + place) : same_magic;
        fixed = (Words)((element - load(scales.base + place)) * load(scales.inverse + place) + magic);
        seen |= fixed;
      }
      if (kStochastic) fixed += (draws[part][row % 16 / 4] >> (8 * (row % 4)) & 255u) << 7;
      storeWords(fixed_values + at, fixed);
      place += kLanes;
      if (place == scales.period) place = 0;
    }
  }
  return seen;
}

template <int kBits>
void pack(std::byte* words, const uint32_t* fixed_values) {
  constexpr uint32_t kTop = (1u << kBits) - 1;
  for (size_t lane = 0; lane < 16; lane += kLanes) {
    Words packed{};
#pragma GCC unroll 32
    for (int row = 0; row < 32; ++row) {
      const Words code = loadWords(fixed_values + row * 16 + lane) >> 15 & kTop;
      const int at = row * kBits % 32, word = row * kBits / 32;
      packed = at == 0 ? code : packed | code << at;
      if (at + kBits >= 32) storeWords(words + (16 * word + lane) * 4, packed);
      if (at + kBits > 32) packed = code >> (32 - at);
    }
  }
}

template <int kBits>
void unpack(uint32_t* codes, const std::byte* words) {
  constexpr uint32_t kTop = (1u << kBits) - 1;
  for (size_t lane = 0; lane < 16; lane += kLanes) {
#pragma GCC unroll 32
    for (int row = 0; row < 32; ++row) {
      const int at = row * kBits % 32, word = row * kBits / 32;
      Words code = loadWords(words + (16 * word + lane) * 4) >> at;
      if (at + kBits > 32) code |= loadWords(words + (16 * (word + 1) + lane) * 4) << (32 - at);
      storeWords(codes + row * 16 + lane, code & kTop);
    }
  }
}

#define LOWCOMM_EACH_WIDTH(loop) {loop<1>, loop<2>, loop<3>, loop<4>, loop<5>, loop<6>, loop<7>, loop<8>}
constexpr void (*kPack[8])(std::byte*, const uint32_t*) = LOWCOMM_EACH_WIDTH(pack);
constexpr void (*kUnpack[8])(uint32_t*, const std::byte*) = LOWCOMM_EACH_WIDTH(unpack);
#undef LOWCOMM_EACH_WIDTH

// Bytes of the words of a short block.
LOWCOMM_INLINE size_t shortBytes(size_t elements, int bits) {
  return ((elements + 15) / 16 * static_cast<size_t>(bits) + 31) / 32 * 64;
}

template <GridRule kRule>
bool encodeBy(std::byte* words, const float* x, size_t count, const ChannelScales& scales, const GridForm& form,
              int bits, const PhiloxKey& key) {
  const auto pack_block = kPack[bits - 1];
  const size_t block_bytes = 64 * static_cast<size_t>(bits);
  uint32_t fixed[kBlock];
  Words seen{};
  size_t place = 0;
  uint64_t block = 0;
  for (; (block + 1) * kBlock <= count; ++block) {
    const float* from = x + block * kBlock;
    for (size_t line = 0; line < kBlock; line += 16)
      __builtin_prefetch(reinterpret_cast<const char*>(from + line) + kAhead);
    seen = quantize<kRule>(fixed, from, place, block, scales, form, key, seen);
    pack_block(words + block * block_bytes, fixed);
  }
  const size_t rest = count - block * kBlock;
  if (rest > 0) {
    // Filled up with what every grid takes, the channels' bases; the codes of that go.
    float padded[kBlock];
    std::byte whole[512];
    for (size_t i = 0; i < kBlock; ++i)
      padded[i] = i < rest ? x[block * kBlock + i] : scales.base ? scales.base[(place + i) % scales.period] : 0;
    seen = quantize<kRule>(fixed, padded, place, block, scales, form, key, seen);
    for (size_t i = rest; i < kBlock; ++i)
      fixed[i] = 0;
    pack_block(whole, fixed);
    __builtin_memcpy(words + block * block_bytes, whole, shortBytes(rest, bits));
  }
  bool taken = true;
  constexpr bool kAffine = kRule != GridRule::centred && kRule != GridRule::sign;
  for (int i = 0; i < kLanes && kAffine; ++i)
    taken &= (seen[i] >> 23) == 0x87;
  return taken;
}

bool encode(std::byte* words, const float* x, size_t count, const ChannelScales& scales, const GridForm& form,
            GridRule rule, int bits, const PhiloxKey& key) {
  switch (rule) {
    case GridRule::nearest:
      return encodeBy<GridRule::nearest>(words, x, count, scales, form, bits, key);
    case GridRule::stochastic:
      return encodeBy<GridRule::stochastic>(words, x, count, scales, form, bits, key);
    case GridRule::dithered:
      return encodeBy<GridRule::dithered>(words, x, count, scales, form, bits, key);
    case GridRule::centred:
      return encodeBy<GridRule::centred>(words, x, count, scales, form, bits, key);
    case GridRule::sign:
      return encodeBy<GridRule::sign>(words, x, count, scales, form, bits, key);
    default:
      return false;  // codebooks have no channels
  }
}

template <bool kCentred, bool kAdd>
LOWCOMM_INLINE void dequantize(float* y, const uint32_t* codes, size_t& place, const float* base, const float* step,
                               size_t period) {
  for (size_t at = 0; at < kBlock; at += kLanes) {
    const Floats number = __builtin_convertvector((Integers)loadWords(codes + at), Floats);
    const Floats b = load(base + place), s = load(step + place);
    const Floats value = kCentred ? (number - b) * s : b + s * number;
    store(y + at, kAdd ? load(y + at) + value : value);
    place += kLanes;
    if (place == period) place = 0;
  }
}

template <bool kCentred, bool kAdd>
void decodeBy(float* y, const std::byte* words, size_t count, const float* base, const float* step, size_t period,
              int bits) {
  const auto unpack_block = kUnpack[bits - 1];
  const size_t block_bytes = 64 * static_cast<size_t>(bits);
  uint32_t codes[kBlock];
  size_t place = 0, at = 0;
  for (; at + kBlock <= count; at += kBlock, words += block_bytes) {
    unpack_block(codes, words);
    dequantize<kCentred, kAdd>(y + at, codes, place, base, step, period);
  }
  if (at == count) return;
  const size_t rest = count - at;
  std::byte whole[512] = {};
  float values[kBlock] = {};
  __builtin_memcpy(whole, words, shortBytes(rest, bits));
  __builtin_memcpy(values, y + at, kAdd ? rest * sizeof(float) : 0);
  unpack_block(codes, whole);
  dequantize<kCentred, kAdd>(values, codes, place, base, step, period);
  __builtin_memcpy(y + at, values, rest * sizeof(float));
}

void decode(float* y, const std::byte* words, size_t count, const float* base, const float* step, size_t period,
            bool centred, bool add, int bits) {
  if (centred) return (add ? decodeBy<true, true> : decodeBy<true, false>)(y, words, count, base, step, period, bits);
  return (add ? decodeBy<false, true> : decodeBy<false, false>)(y, words, count, base, step, period, bits);
}

}  // namespace
}  // namespace lowcomm

// A form's table of them.
#define LOWCOMM_PER_CHANNEL_FORM(form)                                         \
  namespace lowcomm::form {                                                    \
  constexpr ChannelKernels kChannels = {range, largest, sums, encode, decode}; \
  }
