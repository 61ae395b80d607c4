// The loops of change.cpp on the vectors of lanes.inl, compiled once an instruction set.
//
// Rows are not unrolled to whole blocks, and the number of bits is not a constant, as they are in grid_encode.inl: some
// processors follow a stream of memory by the address of the instruction that reads it, and lose one that 32
// instructions read in turn. This costs a shift an element, and saves half of the time of the whole.

#include <cstddef>
#include <cstdint>

#include "kernels/cast/cast.h"
#include "kernels/change/change.h"
//
#include "kernels/grid/grid_vector.inl"

#include "kernels/change/change_group.inl"

namespace lowcomm {
namespace {

constexpr size_t kAheadOfRead = 768;  // elements prefetched before they are read

// The numbers that a segment's codes are decoded with: those of loadScale.
struct ValueScales {
  float of[kMostChangeBucket / kSegment][2];
};

template <GridValue kValue>
LOWCOMM_INLINE void loadScales(ValueScales& scales, const std::byte* meta, const GridForm& form) {
  const size_t segments = form.bucket / kSegment;
  for (size_t i = 0, bucket = 0; i < groupOf(form) / kSegment; ++bucket) {
    float scale[2];
    loadScale<kValue>(scale, meta, bucket, form);
    for (const size_t end = i + segments; i < end; ++i) {
      scales.of[i][0] = scale[0];
      scales.of[i][1] = scale[1];
    }
  }
}

template <GridValue kValue>
LOWCOMM_INLINE Floats changeValue(Words code, Floats base, Floats step) {
  const Floats number = __builtin_convertvector((Integers)code, Floats);
  return kValue == GridValue::centred ? (number - base) * step : base + step * number;
}

template <typename T>
LOWCOMM_INLINE const char* addressOf(const T* x, size_t further) {
  return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(x) + sizeof(T) * further);
}

// Quantizes a group, and reads the next one meanwhile; `from` and `after` are those of the group itself. Returns `seen`
// as encodeBlock.
template <MemoryType kType, GridRule kRule>
LOWCOMM_INLINE Words quantizeGroup(std::byte* words, const NumberOf<kType>* from, NumberOf<kType>* after,
                                   const Group& group, Group& next, const float* x, const NumberOf<kType>* before,
                                   const Scales& scales, const ValueScales& values, const GridForm& form, int bits,
                                   uint64_t block, const PhiloxKey& key) {
  constexpr bool kStochastic = kRule == GridRule::stochastic, kDithered = kRule == GridRule::dithered;
  constexpr GridValue kValue = aroundZero(kRule) ? GridValue::centred : GridValue::affine;
  const uint32_t top = (1u << bits) - 1;
  const size_t count = groupOf(form), span = spanOf(form);
  // Half a random unit rides on the constant, as in encodeBlock.
  const Floats same_magic = splat(kStochastic ? 256.001953125f : kRule == GridRule::centred ? form.magic : 256.5f);
  const Floats lowest_t = splat(form.low), highest_t = splat(form.high);
  Words seen{}, packed[kRegistersARow] = {};
  Words draws[kRegistersARow][4];
  int filled = 0;
  for (size_t line = 0; line < count;) {
    const size_t segment = line / kSegment;
    if (kStochastic && segment % 4 == 0) {
      const uint64_t at = block + segment / 8;
      const PhiloxConstants constants = philoxConstants(at * 32, key);
      for (size_t part = 0; part < kRegistersARow; ++part)
        philoxOfBlock(draws[part], constants, (at * 2 + segment / 4 % 2) * 16 + part * kLanes);
    }
    const Floats minus_base = negated(scales.base[segment]), inverse = splat(scales.inverse[segment]);
    const Floats magic = kDithered ? splat(scales.magic[segment]) : same_magic;
    const Floats value_base = splat(values.of[segment][0]), value_step = splat(values.of[segment][1]);
    Ends<kRule> ends;
    ends.start(load(x + line) - Memory<kType>::get(before + line));
    for (const size_t end = line + span; line < end; line += 16) {
      __builtin_prefetch(addressOf(x, line + kAheadOfRead));
      __builtin_prefetch(addressOf(before, line + kAheadOfRead));
      Words codes[kRegistersARow];
#pragma GCC unroll 4
      for (int part = 0; part < kRegistersARow; ++part) {
        const size_t at = line + static_cast<size_t>(part) * kLanes;
        ends.see(readRow<kType>(next, x, before, at));
        const Floats element = load(group.change + at);
        Words fixed;
        if constexpr (kRule == GridRule::sign) {
          fixed = (Words)(element >= Floats{}) & (1u << 15);
        } else if constexpr (kRule == GridRule::centred) {
          fixed = (Words)(lesser(highest_t, greater(lowest_t, element * inverse)) + magic);
        } else {
          fixed = (Words)((element + minus_base) * inverse + magic);
          seen |= fixed;
        }
        if constexpr (kStochastic) fixed += (draws[part][line / 64 % 4] >> (line / 16 % 4 * 8) & 255u) << 7;
        codes[part] = fixed >> 15 & top;
        packed[part] |= codes[part] << filled;
        const Floats value = changeValue<kValue>(codes[part], value_base, value_step);
        Memory<kType>::put(after + at, Memory<kType>::get(from + at) + value);
      }
      filled += bits;
      if (filled < 32) continue;
      filled -= 32;
#pragma GCC unroll 4
      for (int part = 0; part < kRegistersARow; ++part) {
        storeWords(words + part * kLanes * 4, packed[part]);
        packed[part] = filled > 0 ? codes[part] >> (bits - filled) : Words{};
      }
      words += 64;
    }
    ends.put(next, segment);
  }
  return seen;
}

// Least and largest change of bucket i. NaN needs no care, the quantizer sees it.
LOWCOMM_INLINE void rangeOf(const Group& group, size_t i, const GridForm& form, float* low, float* high) {
  const size_t first = i * form.bucket / kSegment, step = spanOf(form) / kSegment;
  Floats l = group.low[first], h = group.high[first];
  for (size_t j = first + step; j < first + form.bucket / kSegment; j += step) {
    l = lesser(l, group.low[j]);
    h = greater(h, group.high[j]);
  }
  *low = lowest(l);
  *high = highest(h);
}

LOWCOMM_INLINE uint32_t largestOf(const Group& group, size_t i, const GridForm& form) {
  const size_t first = i * form.bucket / kSegment, step = spanOf(form) / kSegment;
  Integers all{};
  for (size_t j = first; j < first + form.bucket / kSegment; j += step)
    all = larger(all, (Integers)group.high[j]);
  int32_t largest = 0;
  for (int lane = 0; lane < kLanes; ++lane)
    largest = all[lane] > largest ? all[lane] : largest;
  return static_cast<uint32_t>(largest);
}

// Scales of a group to `scales`, one a segment, and as sent to meta. False when an element is refused.
template <GridRule kRule>
LOWCOMM_INLINE bool measureGroup(std::byte*& meta, Scales& scales, const Group& group, Dithers& dithers,
                                 uint64_t number, int bits, const GridForm& form, const PhiloxKey& key) {
  constexpr bool kDithered = kRule == GridRule::dithered;
  const size_t buckets = groupOf(form) / form.bucket;
  if (kRule == GridRule::sign || (kRule == GridRule::centred && form.rms)) {  // sums have an order of their own
    if constexpr (aroundZero(kRule)) {
      if (!measureCentred<kRule>(meta, scales, group.change, groupOf(form), 0, form)) return false;
    }
  } else if constexpr (aroundZero(kRule)) {
    for (size_t i = 0; i < buckets; ++i) {
      const uint32_t largest = largestOf(group, i, form);
      if (largest >= kFiniteLimitBits) return false;
      const CentredScale scale = centredScale(floatOf(largest), form);
      scales.inverse[i] = scale.inverse;
      meta = putScale(meta, scale.step, form.bf16);
    }
  } else {
    bool within = true;
    for (size_t i = 0; i < buckets; ++i) {
      rangeOf(group, i, form, &scales.low[i], &scales.high[i]);
      within &= scales.low[i] > -kFiniteLimit && scales.high[i] < kFiniteLimit;
    }
    if (!within || !makeScales(scales, buckets, static_cast<float>((1u << bits) - 1), form)) return false;
    if (kDithered) {
      float bases[kMaxBuckets];
      ditherScales(scales, bases, dithers, buckets, number, form, key);
      meta = writeMeta(meta, scales, bases, buckets, form.bf16);
    } else {
      meta = writeMeta(meta, scales, scales.base, buckets, form.bf16);
    }
  }
  repeatScales(scales, buckets, form.bucket, kDithered);
  return true;
}

template <MemoryType kType, GridRule kRule>
size_t encodeChange(std::byte* meta, std::byte* words, const float* x, const void* memory_before, void* memory_after,
                    size_t count, const GridForm& form, int bits, uint64_t block, const PhiloxKey& key) {
  const auto* before = static_cast<const NumberOf<kType>*>(memory_before);
  auto* after = static_cast<NumberOf<kType>*>(memory_after);
  constexpr GridValue kValue = aroundZero(kRule) ? GridValue::centred : GridValue::affine;
  Group groups[2];
  Scales scales;
  ValueScales values;
  Dithers dithers;
  const size_t group = groupOf(form);
  readGroup<kType, kRule>(groups[0], x, before, form);
  for (size_t start = 0, turn = 0; start < count; start += group, turn ^= 1) {
    const std::byte* sent = meta;
    const uint64_t first = block + start / kBlock;
    if (!measureGroup<kRule>(meta, scales, groups[turn], dithers, first * kBlock / form.bucket, bits, form, key))
      return start;
    loadScales<kValue>(values, sent, form);
    const size_t next = start + group < count ? start + group : start;  // the last one reads itself
    const Words seen = quantizeGroup<kType, kRule>(words, before + start, after + start, groups[turn], groups[turn ^ 1],
                                                   x + next, before + next, scales, values, form, bits, first, key);
    words += group / 8 * static_cast<size_t>(bits);
    bool taken = true;
    for (int i = 0; i < kLanes && !aroundZero(kRule); ++i)
      taken &= (seen[i] >> 23) == 0x87;
    if (taken) continue;
    // What was written is without meaning: x less this is refused in the same elements again.
    for (size_t i = 0; i < group; i += kLanes) {
      const Floats element = load(x + start + i), other = element - load(groups[turn].change + i);
      Memory<kType>::put(after + start + i, element - element == 0 ? other : Floats{});
    }
    return start;
  }
  return count;
}

template <MemoryType kType, GridValue kValue>
void decodeChange(float* y, const void* before, void* after, const std::byte* meta, const std::byte* words,
                  size_t count, const GridForm& form, int bits) {
  const uint32_t top = (1u << bits) - 1;
  const size_t group = groupOf(form);
  ValueScales values;
  for (size_t start = 0; start < count; start += group) {
    const uint32_t bucket = form.bucket;
    const size_t numbers = kValue == GridValue::centred ? 1 : 2, bytes = form.bf16 ? 2 : 4;
    loadScales<kValue>(values, meta + start / bucket * numbers * bytes, form);
    const auto* from = static_cast<const NumberOf<kType>*>(before) + start;
    auto* to = static_cast<NumberOf<kType>*>(after) + start;
    float* out = y + start;
    Words packed[kRegistersARow] = {};
    int used = 32;
    for (size_t segment = 0; segment < group / kSegment; ++segment) {
      const Floats value_base = splat(values.of[segment][0]), value_step = splat(values.of[segment][1]);
#pragma GCC unroll 2
      for (size_t row = 0; row < 4; ++row) {
        const size_t line = segment * kSegment + 16 * row;
        Words codes[kRegistersARow];
        if (used + bits <= 32) {
          for (int part = 0; part < kRegistersARow; ++part)
            codes[part] = packed[part] >> used;
          used += bits;
        } else {
          for (int part = 0; part < kRegistersARow; ++part) {
            const Words more = loadWords(words + part * kLanes * 4);
            codes[part] = used < 32 ? packed[part] >> used | more << (32 - used) : more;
            packed[part] = more;
          }
          words += 64;
          used += bits - 32;
        }
#pragma GCC unroll 4
        for (int part = 0; part < kRegistersARow; ++part) {
          const size_t at = line + static_cast<size_t>(part) * kLanes;
          const Floats value = changeValue<kValue>(codes[part] & top, value_base, value_step);
          const Floats sum = Memory<kType>::get(from + at) + value;
          Memory<kType>::put(to + at, sum);
          store(out + at, sum);
        }
      }
    }
  }
}

}  // namespace
}  // namespace lowcomm

// A form's table of them.
#define LOWCOMM_ENCODE_CHANGE(type)                                                                         \
  {encodeChange<MemoryType::type, GridRule::nearest>, encodeChange<MemoryType::type, GridRule::stochastic>, \
   encodeChange<MemoryType::type, GridRule::dithered>, encodeChange<MemoryType::type, GridRule::centred>,   \
   encodeChange<MemoryType::type, GridRule::sign>}
#define LOWCOMM_DECODE_CHANGE(type) \
  {decodeChange<MemoryType::type, GridValue::affine>, decodeChange<MemoryType::type, GridValue::centred>}
#define LOWCOMM_CHANGE_FORM(form)                                                                         \
  namespace lowcomm::form {                                                                               \
  constexpr ChangeKernels kChanges = {                                                                    \
      {LOWCOMM_ENCODE_CHANGE(float32), LOWCOMM_ENCODE_CHANGE(float16), LOWCOMM_ENCODE_CHANGE(bfloat16)},  \
      {LOWCOMM_DECODE_CHANGE(float32), LOWCOMM_DECODE_CHANGE(float16), LOWCOMM_DECODE_CHANGE(bfloat16)}}; \
  }
