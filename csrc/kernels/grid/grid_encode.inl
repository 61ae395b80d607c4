// From elements to codes, on grid_vector.inl's vectors; part of it.

namespace lowcomm {
namespace {

constexpr bool aroundZero(GridRule rule) {
  return rule == GridRule::centred || rule == GridRule::sign || rule == GridRule::gauss;
}

// One whole block of 512 elements, with a scale for every kRows rows of it: 32 where a bucket is a block or more, else
// 4, the smallest bucket's. (Larger ones repeat theirs: a form for each size would double this file's code for
// nothing.) Returns `seen` OR all fixed-point values, whose upper 9 bits differ from those of 256...512 only for NaN
// and infinity. From `soon` on lies what is fetched meanwhile, as many bytes as x has.
template <int kBits, GridRule kRule, int kRows>
LOWCOMM_INLINE Words encodeBlock(std::byte* words, const float* x, const Scales& scales, size_t first,
                                 const GridForm& form, const Search<kBits, kRule>& search, uint64_t block,
                                 const PhiloxKey& key, const char* soon, Words seen) {
  constexpr bool kStochastic = kRule == GridRule::stochastic, kDithered = kRule == GridRule::dithered;
  const float *base = scales.base + first, *inverse = scales.inverse + first, *magic = scales.magic + first;
  constexpr int kAt = inCodebook(kRule) ? 0 : 15;  // where the code stands in a fixed-point value
  constexpr uint32_t kCode = ((1u << kBits) - 1) << kAt;
  // Half a random unit (64) rides on the constant: one addition saved, the same sum (both are multiples of 2^-15).
  const Floats same_magic = splat(kStochastic ? 256.001953125f : kRule == GridRule::centred ? form.magic : 256.5f);
  const Floats lowest_t = splat(form.low), highest_t = splat(form.high);
  const PhiloxConstants constants = philoxConstants(block * 32, key);
  for (int part = 0; part < kRegistersARow; ++part) {
    const size_t lane = static_cast<size_t>(part) * kLanes;
    Words draws[4];
    Words packed{};
    Floats minus_base = negated(base[0]), inverse_now = splat(inverse[0]);
    Floats magic_now = kDithered ? splat(magic[0]) : same_magic;
#pragma GCC unroll 32
    for (int row = 0; row < 32; ++row) {
      if (row > 0 && row % kRows == 0) {
        minus_base = negated(base[row / kRows]);
        inverse_now = splat(inverse[row / kRows]);
        if (kDithered) magic_now = splat(magic[row / kRows]);
      }
      if (kStochastic && row % 16 == 0) philoxOfBlock(draws, constants, (block * 2 + row / 16) * 16 + lane);
      if (part == 0) __builtin_prefetch(soon + 64 * row);
      const Floats element = load(x + 16 * row + lane);
      Words fixed;
      if constexpr (kRule == GridRule::sign) {
        fixed = (Words)(element >= Floats{}) & (1u << 15);
      } else if constexpr (kRule == GridRule::centred) {
        fixed = (Words)(lesser(highest_t, greater(lowest_t, element * inverse_now)) + magic_now);
      } else if constexpr (kRule == GridRule::gauss) {
        fixed = search.code(element * inverse_now);
      } else if constexpr (kRule == GridRule::levels) {
        const Floats t = (element + minus_base) * inverse_now;
        seen |= (Words)(t + 256.0f);
        fixed = search.code(t);
      } else {
        fixed = (Words)((element + minus_base) * inverse_now + magic_now);
        seen |= fixed;
      }
      if (kStochastic) {
        constexpr uint32_t kDraw = 255u << 7;
        const Words draw = draws[row % 16 / 4];
        const int byte = row % 4;
        fixed += (byte == 0 ? draw << 7 : draw >> (8 * byte - 7)) & kDraw;
      }
      // The code goes to bits [at, at + kBits) of the lane's string; a shift to the left drops what the next word gets.
      const int at = row * kBits % 32, word = row * kBits / 32;
      const Words code = fixed & kCode;
      const Words placed = at <= kAt ? code >> (kAt - at) : code << (at - kAt);
      packed = at == 0 ? placed : packed | placed;
      if constexpr (inCodebook(kRule)) keepOrder(packed);
      if (at + kBits >= 32) storeWords(words + (16 * word + lane) * 4, packed);
      if (at + kBits > 32) packed = code >> (kAt + 32 - at);
    }
  }
  return seen;
}

template <int kBits, GridRule kRule, int kRows>
bool encodeRun(std::byte* meta, std::byte* words, const float* x, size_t count, const GridForm& form, uint64_t block,
               const PhiloxKey& key) {
  constexpr float kLevels = kRule == GridRule::levels ? 1 : (1u << kBits) - 1;  // steps in a bucket's range
  constexpr size_t kBlockBytes = 64 * kBits;
  constexpr bool kDithered = kRule == GridRule::dithered, kCentred = aroundZero(kRule);
  const uint32_t bucket = form.bucket;
  const size_t group = bucket > kGroup ? bucket : kGroup;
  uint64_t number = block * kBlock / bucket;
  Scales scales;
  Words seen{};
  bool within = true;
  Dithers dithers;
  const auto search = searchOf<kBits, kRule>(form);
  const char* soon = static_cast<const char*>(form.soon);
  if (soon == nullptr) soon = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(x) + 4 * kPrefetch);
  for (size_t start = 0; start < count; start += group) {
    const size_t n = count - start < group ? count - start : group;
    const float* source = x + start;
    const size_t buckets = (n + bucket - 1) / bucket;
    if constexpr (kCentred) {
      if (!measureCentred<kRule>(meta, scales, source, n, start + n == count ? form.absent : 0, form)) return false;
    } else {
      for (size_t i = 0; i < buckets; ++i) {
        const size_t from = i * bucket;
        range(source + from, n - from < bucket ? n - from : bucket, &scales.low[i], &scales.high[i]);
        within &= scales.low[i] > -kFiniteLimit && scales.high[i] < kFiniteLimit;
      }
      makeScales(scales, buckets, kLevels, form);
      if (kDithered) {
        float bases[kMaxBuckets];
        ditherScales(scales, bases, dithers, buckets, number, key);
        meta = writeMeta(meta, scales, bases, buckets, form.bf16);
        number += buckets;
      } else {
        meta = writeMeta(meta, scales, scales.base, buckets, form.bf16);
      }
    }
    if (kRows < 32) repeatScales(scales, buckets, bucket, kDithered);
    const size_t span = kRows < 32 ? kRows * 16 : bucket;  // elements a scale stands for
    size_t at = 0;
    for (; at + kBlock <= n; at += kBlock, words += kBlockBytes, ++block) {
      seen = encodeBlock<kBits, kRule, kRows>(words, source + at, scales, at / span, form, search, block, key,
                                              soon + 4 * (start + at), seen);
    }
    if (at < n) {
      // A short block is filled up with its buckets' bases, whose code is 0 for every draw, as unused bits must be.
      const size_t rest = n - at, first = at / span;
      float padded[kBlock];
      std::byte whole[kBlockBytes];
      __builtin_memcpy(padded, source + at, rest * sizeof(float));
      for (size_t i = rest; i < kBlock; ++i)
        padded[i] = scales.base[first + i / (kRows * 16)];
      seen = encodeBlock<kBits, kRule, kRows>(whole, padded, scales, first, form, search, block, key, soon, seen);
      if (kCentred) clearUnused<kBits>(whole, rest);  // whose code for a base, 0, is none
      __builtin_memcpy(words, whole, ((rest + 15) / 16 * kBits + 31) / 32 * 64);
    }
  }
  for (int i = 0; i < kLanes && !kCentred; ++i)
    within &= (seen[i] >> 23) == 0x87;
  return within;
}

template <int kBits, GridRule kRule>
bool encodeGrid(std::byte* meta, std::byte* words, const float* x, size_t count, const GridForm& form, uint64_t block,
                const PhiloxKey& key) {
  return form.bucket < kBlock ? encodeRun<kBits, kRule, 4>(meta, words, x, count, form, block, key)
                              : encodeRun<kBits, kRule, 32>(meta, words, x, count, form, block, key);
}

}  // namespace
}  // namespace lowcomm
