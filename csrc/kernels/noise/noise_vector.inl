// The loops of noise.cpp on the vectors of lanes.inl, compiled once an instruction set. Of an
// instruction set they need, in addition to what lanes.inl does,
//   Floats squareRoot(Floats)                         correctly rounded
//   SumTable sumTable(const float* sums)              of 16 floats, 64-byte aligned, the last 8 the first ones negated
//   Floats lookUp(const SumTable&, Words index)       sums[the lowest 4 bits of index] in every lane
//
// Pieces of 2048 elements, a Rademacher block or 32 Gaussian ones: what a key costs before its first draw is paid once
// a piece. A whole piece of up to four terms goes from registers to where it belongs; other sums pass through 8 KiB
// that stay in the first-level cache.

#include <cstddef>
#include <cstdint>

#include "kernels/isa/table.h"
#include "kernels/noise/noise.h"
#include "kernels/noise/noise_rules.h"
//
#include "kernels/isa/lanes.inl"
#include "kernels/isa/philox_vector.inl"

namespace lowcomm {
namespace {

constexpr size_t kPiece = 2048;

// gaussianRadius of noise_rules.h.
LOWCOMM_INLINE Floats radiusOf(Words words) {
  // u·2^24, which has the octave and the fraction of u: only the octaves are counted from another one.
  const Integers largest = (Integers)splat(kLargestU);
  Integers bits = (Integers)(__builtin_convertvector((Integers)(words >> 8), Floats) + 0.5f);
  bits = bits < largest ? bits : largest;
  const Words above = (Words)bits - (kSqrtHalfBits + (24u << 23));
  const Integers octave = (Integers)above >> 23;
  const Floats f = (Floats)((above & 0x7fffffu) + kSqrtHalfBits) - 1.0f;
  return squareRoot(__builtin_convertvector(octave, Floats) * kMinusTwoLn2 + f * logP(f));
}

// radius times cosineSine of noise_rules.h.
LOWCOMM_INLINE void turn(Floats& cosine, Floats& sine, Floats radius, Words words) {
  radius = (Floats)((Words)radius ^ (words & 0x80000000u));
  const Floats x = (Floats)((words >> 8 & 0x7fffffu) | 0x3f800000u) - 1.5f;
  const Floats square = x * x;
  cosine = radius * (sineS(square) * x);
  sine = radius * cosineC(square);
}

// The words of a piece, each where its element stands. Philox and the two halves of what follows it are loops of their
// own: all are chains of dependent operations, and only several short iterations at a time fill a processor.
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
    if (kAdd) {  // ahead of the only loop that is quick enough to wait for memory
      __builtin_prefetch(before + at);
      __builtin_prefetch(before + at + kNoiseLanes);
    }
    for (size_t i = at; i < at + kNoiseLanes; i += kLanes)
      storeWords(words + i, (Words)radiusOf(loadWords(words + i)));
  }
  for (size_t at = 0; at < kPiece; at += 2 * kNoiseLanes) {
    for (size_t i = at; i < at + kNoiseLanes; i += kLanes) {
      Floats z0, z1;
      turn(z0, z1, load(words + i), loadWords(words + i + kNoiseLanes));
      z0 *= term.factor;
      z1 *= term.factor;
      store(to + i, kAdd ? load(before + i) + z0 : z0);
      store(to + i + kNoiseLanes, kAdd ? load(before + i + kNoiseLanes) + z1 : z1);
    }
  }
}

// to = before + the sum of up to four terms, or that sum alone, for `pieces` pieces from number `piece` on.
template <bool kAdd>
void gaussianPieces(float* to, const float* before, uint64_t piece, size_t pieces, const NoiseTerm* terms,
                    size_t term_count) {
  for (size_t i = 0; i < pieces; ++i, ++piece, to += kPiece, before += kAdd ? kPiece : 0) {
    if (term_count == 1) {
      gaussianTerm<kAdd>(to, before, piece, terms[0]);
      continue;
    }
    float sums[kPiece];
    gaussianTerm<false>(sums, nullptr, piece, terms[0]);
    for (size_t term = 1; term < term_count; ++term)
      gaussianTerm<true>(sums, sums, piece, terms[term]);
    for (size_t j = 0; j < kPiece; j += kLanes)
      store(to + j, kAdd ? load(before + j) + load(sums + j) : load(sums + j));
  }
}

// A piece's draws of a term: [part] has those of the lanes from kLanes·part on.
using Signs = Words[kRegistersARow][4];

LOWCOMM_INLINE void drawSigns(Signs& signs, uint64_t piece, const PhiloxKey& key) {
  const PhiloxConstants constants = philoxConstants(piece * kNoiseLanes, key);
  for (size_t part = 0; part < kRegistersARow; ++part)
    philoxOfBlock(signs[part], constants, piece * kNoiseLanes + part * kLanes);
}

// One term: the sign of a factor is the drawn bit, negated. The next piece is drawn in the midst of this one, a
// register at a time: memory has always enough to bring while nothing is loaded.
template <bool kAdd>
void rademacherTerm(float* to, const float* before, uint64_t piece, size_t pieces, const NoiseTerm& term) {
  const Words factor = (Words)splat(term.factor);
  Signs now, next;
  drawSigns(next, piece, term.key);
  for (size_t i = 0; i < pieces; ++i) {
    __builtin_memcpy(now, next, sizeof(now));
    const uint64_t counter = ++piece * kNoiseLanes;
    const PhiloxConstants constants = philoxConstants(counter, term.key);
    for (size_t word = 0; word < 4; ++word, to += 32 * kNoiseLanes, before += kAdd ? 32 * kNoiseLanes : 0) {
      Words minus[kRegistersARow];
      for (int part = 0; part < kRegistersARow; ++part)
        minus[part] = ~now[part][word];
#pragma GCC unroll 32
      for (int row = 0; row < 32; ++row) {
        for (int part = 0; part < kRegistersARow; ++part) {
          const size_t at = row * kNoiseLanes + static_cast<size_t>(part) * kLanes;
          const Floats value = (Floats)((minus[part] << (31 - row) & 0x80000000u) ^ factor);
          store(to + at, kAdd ? load(before + at) + value : value);
        }
      }
      if (word % (4 / kRegistersARow) == 0) {
        const size_t part = word / (4 / kRegistersARow);
        philoxOfBlock(next[part], constants, counter + part * kLanes);
      }
    }
  }
}

// Up to four terms: their bits are an index into the sums that there can be. Half of these are the others negated, so
// the index has the first three bits as they are with the fourth one set, and the fourth's complement: the sign.
template <bool kAdd>
LOWCOMM_INLINE void rademacherPiece(float* to, const float* before, uint64_t piece, const NoiseTerm* terms,
                                    size_t term_count) {
  alignas(64) float sums[16] = {};
  for (uint32_t index = 0; index < 8; ++index) {
    for (size_t term = 0; term < term_count; ++term) {
      const float value = term == 3 || (index >> term & 1) ? terms[term].factor : -terms[term].factor;
      sums[index] = term == 0 ? value : sums[index] + value;
    }
    sums[index + 8] = -sums[index];
  }
  const SumTable table = sumTable(sums);
  Signs draws[kNoiseGroup];
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

// As gaussianPieces.
template <bool kAdd>
void rademacherPieces(float* to, const float* before, uint64_t piece, size_t pieces, const NoiseTerm* terms,
                      size_t term_count) {
  if (term_count == 1) return rademacherTerm<kAdd>(to, before, piece, pieces, terms[0]);
  for (size_t i = 0; i < pieces; ++i, to += kPiece, before += kAdd ? kPiece : 0)
    rademacherPiece<kAdd>(to, before, piece + i, terms, term_count);
}

using Pieces = void (*)(float* to, const float* before, uint64_t piece, size_t pieces, const NoiseTerm* terms,
                        size_t term_count);

// kPlain and kAdding: a kind's pieces without and with what they are added to.
template <Pieces kPlain, Pieces kAdding>
void addTerms(float* out, const float* x, uint64_t first, size_t count, const NoiseTerm* terms, size_t term_count) {
  float sums[kPiece];
  for (size_t at = 0; at < count;) {
    const uint64_t piece = (first + at) / kPiece;
    const size_t from = (first + at) % kPiece;
    if (from == 0 && count - at >= kPiece && term_count <= kNoiseGroup) {
      const size_t pieces = (count - at) / kPiece;
      if (x) {
        kAdding(out + at, x + at, piece, pieces, terms, term_count);
      } else {
        kPlain(out + at, nullptr, piece, pieces, terms, term_count);
      }
      at += pieces * kPiece;
      continue;
    }
    const size_t n = kPiece - from < count - at ? kPiece - from : count - at;
    for (size_t term = 0; term < term_count; term += kNoiseGroup) {
      const size_t group = term_count - term < kNoiseGroup ? term_count - term : kNoiseGroup;
      // The elements are on their way while their sum is made.
      for (size_t i = n * term / term_count; x && i < n * (term + group) / term_count; i += 16)
        __builtin_prefetch(x + at + i);
      if (term == 0) {
        kPlain(sums, nullptr, piece, 1, terms, group);
      } else {
        kAdding(sums, sums, piece, 1, terms + term, group);
      }
    }
    for (size_t i = 0; i < n; ++i)
      out[at + i] = x ? x[at + i] + sums[from + i] : sums[from + i];
    at += n;
  }
}

}  // namespace
}  // namespace lowcomm

// A form's table of them.
#define LOWCOMM_NOISE_FORM(form)                                                               \
  namespace lowcomm::form {                                                                    \
  constexpr NoiseKernels kNoise = {addTerms<gaussianPieces<false>, gaussianPieces<true>>,      \
                                   addTerms<rademacherPieces<false>, rademacherPieces<true>>}; \
  }
