// The loops of noise_scalar.cpp on the vectors of lanes.inl, compiled once an instruction set. The including file has
// also defined
//   Floats squareRoot(Floats)                         correctly rounded
//   SumTable sumTable(const float* sums)              of 16 floats, 64-byte aligned, the last 8 the first ones negated
//   Floats lookUp(const SumTable&, Words index)       sums[the lowest 4 bits of index] in every lane
//
// Pieces of 2048 elements, a Rademacher block or 32 Gaussian ones: what a key costs before its first draw is paid once
// a piece. A whole piece of up to four terms goes from registers to where it belongs; other sums pass through 8 KiB
// that stay in the first-level cache.

#include "kernels/lanes.inl"
#include "kernels/philox_vector.inl"

namespace lowcomm {
namespace {

constexpr size_t kPiece = 2048;
constexpr size_t kPrefetch = 2048;  // elements ahead

// gaussianRadius and cosineSine of noise_rules.h.
LOWCOMM_INLINE void boxMuller(Floats& cosine, Floats& sine, Words of_radius, Words of_angle) {
  Floats u = __builtin_convertvector((Integers)(of_radius >> 8), Floats) + 0.5f;
  u = (u < kLargestU ? u : splat(kLargestU)) * 0x1p-24f;
  const Words bits = (Words)u;
  const Integers octave = (Integers)(bits - kSqrtHalfBits) >> 23;
  const Floats f = (Floats)(bits - ((Words)octave << 23)) - 1.0f;
  const Floats log = __builtin_convertvector(octave, Floats) * kMinusTwoLn2 + f * logP(f);
  const Floats radius = (Floats)((Words)squareRoot(log) ^ (of_angle & 0x80000000u));
  const Floats x = (Floats)((of_angle >> 8 & 0x7fffffu) | 0x3f800000u) - 1.5f;
  const Floats square = x * x;
  cosine = radius * (sineS(square) * x);
  sine = radius * cosineC(square);
}

// The words of a piece, each where its element stands. Philox and what follows it are loops of their own: both are long
// chains of dependent operations, and only neighbouring short iterations of one loop fill a processor.
LOWCOMM_INLINE void drawWords(uint32_t* words, uint64_t piece, const PhiloxKey& key) {
  const PhiloxConstants constants = philoxConstants(piece * (kPiece / 4), key);
  for (size_t at = 0; at < kPiece; at += kGaussianBlock) {
    for (size_t lane = 0; lane < kNoiseLanes; lane += kLanes) {
      Words draws[4];
      philoxOfBlock(draws, constants, (piece * kPiece + at) / 4 + lane);
      for (size_t row = 0; row < 4; ++row)
        storeWords(words + at + row * kNoiseLanes + lane, draws[row]);
    }
  }
}

// to = before + factor·z, or that alone, for one piece of one term.
template <bool kAdd>
LOWCOMM_INLINE void gaussianTerm(float* to, const float* before, uint64_t piece, const NoiseTerm& term) {
  uint32_t words[kPiece];
  drawWords(words, piece, term.key);
  for (size_t at = 0; at < kPiece; at += 2 * kNoiseLanes) {
    for (size_t i = at; i < at + kNoiseLanes; i += kLanes) {
      Floats z0, z1;
      boxMuller(z0, z1, loadWords(words + i), loadWords(words + i + kNoiseLanes));
      z0 *= term.factor;
      z1 *= term.factor;
      store(to + i, kAdd ? load(before + i) + z0 : z0);
      store(to + i + kNoiseLanes, kAdd ? load(before + i + kNoiseLanes) + z1 : z1);
    }
  }
}

// to = before + the sum of up to four terms, or that sum alone, for one piece.
template <bool kAdd>
void gaussianPiece(float* to, const float* before, uint64_t piece, const NoiseTerm* terms, size_t term_count) {
  if (term_count == 1) return gaussianTerm<kAdd>(to, before, piece, terms[0]);
  float sums[kPiece];
  gaussianTerm<false>(sums, nullptr, piece, terms[0]);
  for (size_t term = 1; term < term_count; ++term)
    gaussianTerm<true>(sums, sums, piece, terms[term]);
  for (size_t i = 0; i < kPiece; i += kLanes)
    store(to + i, kAdd ? load(before + i) + load(sums + i) : load(sums + i));
}

// The piece's draws of a term: word w of the lanes from kLanes·part on.
LOWCOMM_INLINE void drawSigns(Words (&draws)[kRegistersARow][4], uint64_t piece, const PhiloxKey& key) {
  const PhiloxConstants constants = philoxConstants(piece * kNoiseLanes, key);
  for (size_t part = 0; part < kRegistersARow; ++part)
    philoxOfBlock(draws[part], constants, piece * kNoiseLanes + part * kLanes);
}

// One term: the sign of a factor is the drawn bit, negated.
template <bool kAdd>
void rademacherTerm(float* to, const float* before, uint64_t piece, const NoiseTerm& term) {
  const Words factor = (Words)splat(term.factor);
  Words draws[kRegistersARow][4];
  drawSigns(draws, piece, term.key);
  for (size_t word = 0; word < 4; ++word, to += 32 * kNoiseLanes, before += kAdd ? 32 * kNoiseLanes : 0) {
    Words minus[kRegistersARow];
    for (int part = 0; part < kRegistersARow; ++part)
      minus[part] = ~draws[part][word];
#pragma GCC unroll 32
    for (int row = 0; row < 32; ++row) {
      if (kAdd) __builtin_prefetch(before + row * kNoiseLanes + kPrefetch);
      for (int part = 0; part < kRegistersARow; ++part) {
        const size_t i = row * kNoiseLanes + static_cast<size_t>(part) * kLanes;
        const Floats value = (Floats)((minus[part] << (31 - row) & 0x80000000u) ^ factor);
        store(to + i, kAdd ? load(before + i) + value : value);
      }
    }
  }
}

// Up to four terms: their bits are an index into the sums that there can be. Half of these are the others negated, so
// the index has the first three bits as they are with the fourth one set, and the fourth's complement: the sign.
template <bool kAdd>
void rademacherPiece(float* to, const float* before, uint64_t piece, const NoiseTerm* terms, size_t term_count) {
  if (term_count == 1) return rademacherTerm<kAdd>(to, before, piece, terms[0]);
  alignas(64) float sums[16] = {};
  for (uint32_t index = 0; index < 8; ++index) {
    for (size_t term = 0; term < term_count; ++term) {
      const float value = term == 3 || (index >> term & 1) ? terms[term].factor : -terms[term].factor;
      sums[index] = term == 0 ? value : sums[index] + value;
    }
    sums[index + 8] = -sums[index];
  }
  const SumTable table = sumTable(sums);
  Words draws[kNoiseGroup][kRegistersARow][4];
  for (size_t term = 0; term < term_count; ++term)
    drawSigns(draws[term], piece, terms[term].key);
  for (size_t word = 0; word < 4; ++word, to += 32 * kNoiseLanes, before += kAdd ? 32 * kNoiseLanes : 0) {
    for (int part = 0; part < kRegistersARow; ++part) {
      const size_t lane = static_cast<size_t>(part) * kLanes;
      const Words sign = term_count == 4 ? ~draws[3][part][word] : Words{};
      const Words b0 = draws[0][part][word] ^ sign, b1 = draws[1][part][word] ^ sign;
      const Words b2 = term_count > 2 ? draws[2][part][word] ^ sign : Words{};
      // Row 4·i + j has its four bits at [4·i, 4·i + 4) of index[j].
      const uint32_t first = 0x11111111u;
      const Words index[4] = {
          (b0 & first) | (b1 << 1 & first << 1) | (b2 << 2 & first << 2) | (sign << 3 & first << 3),
          (b0 >> 1 & first) | (b1 & first << 1) | (b2 << 1 & first << 2) | (sign << 2 & first << 3),
          (b0 >> 2 & first) | (b1 >> 1 & first << 1) | (b2 & first << 2) | (sign << 1 & first << 3),
          (b0 >> 3 & first) | (b1 >> 2 & first << 1) | (b2 >> 1 & first << 2) | (sign & first << 3)};
#pragma GCC unroll 32
      for (int row = 0; row < 32; ++row) {
        const size_t i = row * kNoiseLanes + lane;
        const Floats value = lookUp(table, index[row % 4] >> (row / 4 * 4));
        store(to + i, kAdd ? load(before + i) + value : value);
      }
    }
  }
}

using Piece = void (*)(float* to, const float* before, uint64_t piece, const NoiseTerm* terms, size_t term_count);

// kPlain and kAdding: a kind's two pieces.
template <Piece kPlain, Piece kAdding>
void addTerms(float* out, const float* x, uint64_t first, size_t count, const NoiseTerm* terms, size_t term_count) {
  float sums[kPiece];
  for (size_t at = 0; at < count;) {
    const uint64_t piece = (first + at) / kPiece;
    const size_t from = (first + at) % kPiece;
    const size_t n = kPiece - from < count - at ? kPiece - from : count - at;
    if (n == kPiece && term_count <= kNoiseGroup) {
      if (x) {
        kAdding(out + at, x + at, piece, terms, term_count);
      } else {
        kPlain(out + at, nullptr, piece, terms, term_count);
      }
    } else {
      for (size_t term = 0; term < term_count; term += kNoiseGroup) {
        const size_t group = term_count - term < kNoiseGroup ? term_count - term : kNoiseGroup;
        // The elements are on their way while their sum is made.
        for (size_t i = n * term / term_count; x && i < n * (term + group) / term_count; i += 16)
          __builtin_prefetch(x + at + i);
        if (term == 0) {
          kPlain(sums, nullptr, piece, terms, group);
        } else {
          kAdding(sums, sums, piece, terms + term, group);
        }
      }
      for (size_t i = 0; i < n; ++i)
        out[at + i] = x ? x[at + i] + sums[from + i] : sums[from + i];
    }
    at += n;
  }
}

constexpr NoiseKernels kNoise = {addTerms<gaussianPiece<false>, gaussianPiece<true>>,
                                 addTerms<rademacherPiece<false>, rademacherPiece<true>>};

}  // namespace
}  // namespace lowcomm
