// Codes and values of codebooks (codebook.h) on grid_vector.inl's vectors, whose part this is. A file that makes those
// loops, codebook_<isa>.cpp, has defined in addition to what grid_vector.inl asks for
//   Words gather(const uint32_t* table, Words index)   table[index] in every lane
//   template <int kBits> Floats lookUp(const float* table, Words index)
//                                                      the same in a table of 2^kBits numbers, of which 16 can be read

namespace lowcomm {
namespace {

constexpr bool inCodebook(GridRule rule) {
  return rule == GridRule::levels || rule == GridRule::gauss;
}

// Turns quotients into codes. Up to 15 thresholds, each is compared with; of more the one in t's cell is looked up. For
// rules without a codebook it is empty.
template <int kBits, GridRule kRule>
struct Search {};

// Holds GCC to one row after the other, on a row's quotients and on what it packs: it would take the first steps of
// all 32 rows at once, and spill most of them.
template <class V>
LOWCOMM_INLINE void keepOrder([[maybe_unused]] V& v) {
#if defined(__x86_64__)
  if constexpr (sizeof(V) <= __BIGGEST_ALIGNMENT__) asm volatile("" : "+v"(v));  // a vector of one register
#endif
}

// Thresholds in no order but their own.
template <int kBits>
struct Search<kBits, GridRule::levels> {
  static constexpr int kThresholds = (1 << kBits) - 1;
  static constexpr int kCompared = kBits <= 4 ? kThresholds : 0;

  Floats threshold[kCompared > 0 ? kCompared : 1];
  const Codebook* book;

  explicit __attribute__((always_inline)) Search(const Codebook* codebook) : book(codebook) {
    for (int i = 0; i < kCompared; ++i)
      threshold[i] = splat(book->threshold[i]);
  }

  // Returns some valid code for a NaN.
  __attribute__((always_inline)) Words code(Floats t) const {
    if constexpr (kCompared > 0) {
      keepOrder(t);
      Words code{};
#pragma GCC unroll 15
      for (int i = 0; i < kCompared; ++i)
        code -= (Words)(t > threshold[i]);
      return code;
    } else {
      const Words cell = (Words)(t + Codebook::kLevelsMagic) & (Codebook::kCells - 1);
      Words code = gather(book->cell, cell);
      for (int i = 0; i < book->most_a_cell; ++i)
        code -= (Words)(t > (Floats)gather(reinterpret_cast<const uint32_t*>(book->threshold), code));
      return code;
    }
  }
};

// Thresholds that mirror each other around one at 0: only |t| is compared. As integers, for then one more in the last
// place makes "not above" of "below": that is what |t| is asked where t is not above 0, and the code then mirrored.
template <int kBits>
struct Search<kBits, GridRule::gauss> {
  static constexpr int kHalf = 1 << (kBits - 1);
  static constexpr int kCompared = kBits <= 5 && kBits != 4 ? kHalf - 1 : -1;

  Integers threshold[kCompared > 0 ? kCompared : 1];
  Floats least, most;  // what |t| is held to, for looking up
  const Codebook* book;

  explicit __attribute__((always_inline)) Search(const Codebook* codebook) : book(codebook) {
    least = splat(Codebook::kGaussLeast);
    most = splat(kBits == 4 ? 7 : Codebook::kGaussMost);
    keepOrder(least);  // no longer constants, of which GCC makes a comparison and a choice where minimum is meant
    keepOrder(most);
    for (int i = 0; i < kCompared; ++i)
      threshold[i] = (Integers)splat(book->threshold[kHalf + i]);
  }

  // Bits above the code's are without meaning.
  __attribute__((always_inline)) Words code(Floats t) const {
    keepOrder(t);
    const Words mirrored = (Words)(t <= Floats{});
    const Words magnitude = (Words)t & kMagnitude;
    const Integers asked = (Integers)(magnitude - mirrored);
    if constexpr (kBits == 4) {
      constexpr float kToInteger = 0x1p23f + Codebook::kNearestShift;  // and the code of a j with no threshold below
      const Floats near = lesser(most, (Floats)magnitude * Codebook::kNearestFactor);
      const Words code = (Words)(near + kToInteger);
      return (code - (Words)(asked > (Integers)lookUp<3>(book->nearest, code))) ^ mirrored;
    } else if constexpr (kCompared >= 0) {
      Words code = splatWord(kHalf);
#pragma GCC unroll 15
      for (int i = 0; i < kCompared; ++i)
        code -= (Words)(asked > threshold[i]);
      return code ^ mirrored;
    } else {
      const Floats held = lesser(most, greater(least, (Floats)magnitude));
      const Words own = gather(book->cell, (Words)(held + Codebook::kGaussMagic) & 511u);
      const Integers above = (Integers)((((Words)held - mirrored) << 8) - own);
      return (own - (Words)(above > 0)) ^ mirrored;
    }
  }
};

template <int kBits, GridRule kRule>
LOWCOMM_INLINE Search<kBits, kRule> searchOf(const GridForm& form) {
  if constexpr (inCodebook(kRule)) {
    return Search<kBits, kRule>(form.book);
  } else {
    return {};
  }
}

// The number that is multiplied with the bucket's step: the code itself, or its level.
template <int kBits, GridValue kValue>
LOWCOMM_INLINE Floats numberOf(Words code, const GridForm& form) {
  if constexpr (kValue == GridValue::levels || kValue == GridValue::gauss) {
    return lookUp<kBits>(form.book->level, code);
  } else {
    return __builtin_convertvector((Integers)code, Floats);
  }
}

}  // namespace
}  // namespace lowcomm
