// A memory's types, and groups of its changes as they are read and measured, on grid_vector.inl's vectors; part of
// change_vector.inl.

namespace lowcomm {
namespace {

constexpr size_t kSegment = 64;  // the smallest bucket: elements that share a scale

// kLanes numbers of a memory. What is written is held to the type's largest.
LOWCOMM_INLINE Floats heldTo(Floats x, float largest) {
  x = x < -largest ? splat(-largest) : x;
  return largest < x ? splat(largest) : x;
}

template <MemoryType kType>
struct Memory;

template <>
struct Memory<MemoryType::float32> {
  typedef float Number;
  LOWCOMM_INLINE Floats get(const Number* p) { return load(p); }
  LOWCOMM_INLINE void put(Number* p, Floats x) { store(p, x); }
};
template <>
struct Memory<MemoryType::float16> {
  typedef uint16_t Number;
  LOWCOMM_INLINE Floats get(const Number* p) { return floatsOfHalves(p); }
  LOWCOMM_INLINE void put(Number* p, Floats x) { storeAsHalves(p, heldTo(x, kFloat16Largest)); }
};
template <>
struct Memory<MemoryType::bfloat16> {
  typedef uint16_t Number;
  LOWCOMM_INLINE Floats get(const Number* p) { return (Floats)(loadHalves(p) << 16); }
  LOWCOMM_INLINE void put(Number* p, Floats x) {
    const Words bits = (Words)heldTo(x, kBfloat16Largest);
    storeHalves(p, (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
};
template <MemoryType kType>
using NumberOf = typename Memory<kType>::Number;

LOWCOMM_INLINE size_t groupOf(const GridForm& form) {
  return form.bucket < kBlock ? kBlock : form.bucket;
}

// What changed of a group's elements, and of each span of them what its bucket's statistics are made of, a lane each:
// least and largest changes, or in `high` the largest magnitude. Two groups are in use together, 6 KiB from each other:
// where what is read of one and what is written of the other have the same place in their pages of 4 KiB, a processor
// takes the one for the other for a while, and waits.
struct Group {
  alignas(64) float change[kMostChangeBucket];
  Floats low[1024 / sizeof(Floats)], high[1024 / sizeof(Floats)];  // of each 64 elements, if not of more
};
static_assert(sizeof(Group) % 4096 == 2048 && sizeof(Floats) * kMostChangeBucket / kSegment <= 1024);

// Elements that are quantized by one scale and measured by themselves.
LOWCOMM_INLINE size_t spanOf(const GridForm& form) {
  return form.bucket < 4 * kSegment ? kSegment : 4 * kSegment;
}

// The statistics of a span, as its rows are read.
template <GridRule kRule>
struct Ends {
  Floats low, high;
  Integers largest{};

  __attribute__((always_inline)) inline void start(Floats first) { low = high = first; }
  __attribute__((always_inline)) inline void see(Floats change) {
    if constexpr (kRule == GridRule::centred) {
      largest = larger(largest, (Integers)((Words)change & kMagnitude));
    } else if constexpr (!aroundZero(kRule)) {
      low = lesser(low, change);
      high = greater(high, change);
    }
  }
  __attribute__((always_inline)) inline void put(Group& group, size_t segment) const {
    if constexpr (kRule == GridRule::centred) {
      group.high[segment] = (Floats)largest;
    } else if constexpr (!aroundZero(kRule)) {
      group.low[segment] = low;
      group.high[segment] = high;
    }
  }
};

template <MemoryType kType>
LOWCOMM_INLINE Floats readRow(Group& group, const float* x, const NumberOf<kType>* before, size_t at) {
  const Floats change = load(x + at) - Memory<kType>::get(before + at);
  store(group.change + at, change);
  return change;
}

// What quantizeGroup does of the next group, by itself.
template <MemoryType kType, GridRule kRule>
LOWCOMM_INLINE void readGroup(Group& group, const float* x, const NumberOf<kType>* before, const GridForm& form) {
  const size_t count = groupOf(form), span = spanOf(form);
  for (size_t line = 0; line < count;) {
    const size_t segment = line / kSegment;
    Ends<kRule> ends;
    ends.start(load(x + line) - Memory<kType>::get(before + line));
    for (const size_t end = line + span; line < end; line += kLanes)
      ends.see(readRow<kType>(group, x, before, line));
    ends.put(group, segment);
  }
}

}  // namespace
}  // namespace lowcomm
