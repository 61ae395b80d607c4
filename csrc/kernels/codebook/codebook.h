#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "kernels/grid/grid_form.h"
#include "kernels/philox.h"

namespace lowcomm {

// How the blocks of a run are rotated: where they are of units, with signs that turn from block to block (turnOf()
// below), of which the run's first one has the number `first`, and across their lanes too.
struct Blocks {
  uint64_t first = 0;
  bool units = false;
};

// The values of a codec that are not evenly spaced: 2^b levels and, halfway between neighbours, 2^b - 1 thresholds.
// t's code is the number of thresholds strictly below it (FORMAT.md, "Levels and gauss").
//
// `cell` is for vector forms of many bits, where comparing with every threshold would take too long: cells of equal
// width, and what is known of t by its cell.
struct Codebook {
  static constexpr uint32_t kCells = 2048;
  static constexpr float kLevelsMagic = 8192.0f;   // t + this has t's cell in its lowest bits: cells of 2^-10
  static constexpr float kGaussMagic = 131072.0f;  // cells of 2^-6
  static constexpr float kGaussLeast = 0x1p-6f;    // magnitudes are held to this, below all thresholds but 0 ...
  static constexpr float kGaussMost = 7.9375f;     // ... and this, above all of them

  // gauss4's thresholds above 0 are so nearly even that kNearestFactor·|t|, at most 7 and rounded to an integer j, is
  // the number of the one below t or of the next: threshold j stands at j + kNearestShift (mod 8), -1 for j = 0.
  static constexpr float kNearestFactor = 3.2f;
  static constexpr int kNearestShift = 7;
  alignas(64) float nearest[16];

  int bits;
  alignas(64) float level[256];      // 2^bits of them, ascending; then the last one again
  alignas(64) float threshold[256];  // 2^bits - 1 of them, ascending; then infinity

  // In a levels codebook: the number of thresholds in lower cells, by t's cell; a cell holds at most `most_a_cell`. In
  // a gauss codebook, whose cells hold one threshold at most: by |t|'s cell, 2^(bits-1) and the number of thresholds
  // above 0 in lower cells, in the lowest byte; above it the lower 24 bits of the cell's own threshold, or of a number
  // that no value in the cell is below. Within a cell the difference of two numbers' bits is less than 2^23, so that is
  // enough.
  alignas(64) uint32_t cell[kCells];
  int most_a_cell;
};

// The codebook of 2^bits levels in 0...1 from lowest to highest.
void makeLevels(Codebook& book, int bits, const float* levels);

// The one of gauss<bits>; made once.
const Codebook& gaussCodebook(int bits);

// How a bucket's scale and the codebook's levels make a value: base + range·level (levels), level·step·gain (gauss).
inline constexpr int kCodebookRules = 2;
enum class CodebookRule : uint8_t { levels, gauss };

// The loops of one instruction set, as those of KernelTable (kernels/isa/table.h): encode[b - 1][rule] and
// decode[b - 1][rule][add]. form.book is the codebook.
//
// change[b - 1] and advance[b - 1] are deltas of gauss with buckets of 512 elements (FusedCodec::encodeDelta), in one
// pass over the first-level cache; null in the reference, whose loops one after the other have the same bits. `count`
// is a multiple of 512; `after` may be `before`. change encodes x - before, and after = before + what that decodes to;
// it returns the number of elements that are done, all before a block whose sums might round otherwise by themselves
// than scaled as the format has it, or which holds an element that is refused. advance: y = after = before + decoded.
struct CodebookLoops {
  using Encode = bool (*)(std::byte* meta, std::byte* words, const float* x, size_t count, const GridForm& form,
                          uint64_t block, const PhiloxKey& key);
  using Decode = void (*)(float* y, const std::byte* meta, const std::byte* words, size_t count, const GridForm& form);

  using Change = size_t (*)(std::byte* meta, std::byte* words, float* after, const float* x, const float* before,
                            size_t count, const GridForm& form, Blocks blocks);
  using Advance = void (*)(float* y, float* after, const float* before, const std::byte* meta, const std::byte* words,
                           size_t count, const GridForm& form, Blocks blocks);

  Encode encode[8][kCodebookRules];
  Decode decode[8][kCodebookRules][2];
  Change change[8];
  Advance advance[8];
};

// The rotation of `gauss` and `rotate=1` (FORMAT.md, "Rotation"): in each block of 512 elements, 32 rows of 16 lanes,
// signs and a Walsh-Hadamard transform along the rows of every lane: of all 32, or of each 16, 8, 4, 2 or 1 that follow
// each other, which are then a part of a unit ("Units"), and of units along the 16 lanes of every row, for a model's
// activations have single channels that outweigh all others. Orthonormal, so its inverse is itself with the signs last.
// It makes any tensor's elements nearly normal, which a table for the normal distribution then serves equally well.

// rows^-1/2, to nearest, for a power of two up to 32; of units (16·rows)^-1/2.
constexpr float rotationScale(int rows, bool units = false) {
  const bool odd = rows == 2 || rows == 8 || rows == 32;
  return (odd ? 0x1.6a09e6p-1f : 1.0f) / (rows >= 16 ? 4 : rows >= 4 ? 2 : 1) / (units ? 4 : 1);
}
inline constexpr float kRotationScale = rotationScale(32), kUnitRotationScale = rotationScale(32, true);

// Row r of lane l changes its sign where bit r of this word is set: word l mod 4 of philox(l / 4) under key 0.
inline constexpr uint32_t kRotationSigns[16] = {
    0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u, 0xf8e4cca4u, 0x5cb200dbu, 0xb1a574ebu, 0x097eff67u,
    0x04faa329u, 0x51c732a6u, 0x241513adu, 0x459135e4u, 0xc990ef29u, 0x6a4474a6u, 0x9ac9134fu, 0x6d413e04u};

// Units' blocks have other signs each, or models learn to send what `gauss` clips (FORMAT.md, "Units"): row r of every
// lane changes its sign once more where bit r of this word is set.
LOWCOMM_RULE constexpr uint32_t turnOf(uint64_t block) {
  uint32_t x = static_cast<uint32_t>(block);  // the finalizer of MurmurHash3, whose bits all depend on all of x's
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

// The turnOf() word of a run's block `at`, counted from the run's first one.
LOWCOMM_RULE constexpr uint32_t turnAt(Blocks blocks, size_t at) {
  return blocks.units ? turnOf(blocks.first + at) : 0;
}

// The loops of one instruction set, by the binary logarithm of the rows. Pointers need only the alignment of their
// type; no function allocates or throws; all are called under FloatEnv. Blocks are counted from the pointers.
//
// rotate: y[0, n) = rotated x[0, count), where n is count rounded up to 512 at 32 rows, zeros standing in for what x
// lacks, and count itself at fewer, a multiple of 16·rows. y may be x, where its memory goes on that far. Returns false
// when an element of x is not finite or is kRotatedLimit or more in magnitude (kernels/finite.h): y is then without
// meaning.
//
// unrotate[add]: y[0, count) = x[0, n) rotated back, or += that; y may be x.
struct RotationLoops {
  using Rotate = bool (*)(float* y, const float* x, size_t count, Blocks blocks);
  using Unrotate = void (*)(float* y, const float* x, size_t count, Blocks blocks);

  Rotate rotate[6];
  Unrotate unrotate[6][2];
};
inline constexpr int kAllRows = 5;  // 32 of them

}  // namespace lowcomm
