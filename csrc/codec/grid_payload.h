#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "codec/family.h"
#include "codec/spec.h"
#include "kernels/grid/grid_form.h"

namespace lowcomm {

// The parts of a grid payload that do not depend on how its buckets lie.

// How the loops encode a family, and what else they must know of a codec (which misfit() has nothing against): its
// constants; its bucket is spec.bucket.
GridRule gridRule(const GridFamily& family);
GridForm gridForm(const CodecSpec& spec);

// The metadata of a codec's buckets or channels, one after another: base and step, or the step alone where none is
// sent.
struct GridScales {
  explicit GridScales(const CodecSpec& spec);

  size_t numbers;  // of a bucket
  size_t number_bytes;
  Meta meta;
  Nonfinite nonfinite;

  size_t bytes(uint64_t buckets) const { return numbers * number_bytes * buckets; }

  // The numbers of a poisoned bucket: NaN for the base, or for the step where no base is sent; else 0 for the step.
  void poison(std::byte* scales, uint64_t bucket) const;
  bool isPoison(const std::byte* scales, uint64_t bucket) const;

  // Throws WireError for a number that is not finite, but for poison where the codec has it. `of` names what a bucket
  // is: "bucket", "channel".
  void expectFinite(const std::byte* scales, uint64_t buckets, const std::string& codec, const char* of) const;
};

// Bytes of the blocks of `count` codes (FORMAT.md, "Payload of a grid codec").
size_t gridWordBytes(int bits, uint64_t count);

// Throw WireError: a code of tern that is none; a bit of the last block that belongs to no element and is not 0.
void expectThreeCodes(std::span<const std::byte> words, const std::string& codec);
void expectUnusedZero(std::span<const std::byte> words, int bits, uint64_t count, const std::string& codec,
                      bool rotated = false);

}  // namespace lowcomm
