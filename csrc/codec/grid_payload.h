#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "codec/family.h"
#include "codec/spec.h"
#include "kernels/grid_form.h"

namespace lowcomm {

// What all forms of a grid codec share, whichever way its buckets lie.

// How the loops encode a family, and what else they must know of a codec (which misfit() has nothing against): its
// constants; its bucket is spec.bucket.
GridRule gridRule(const GridFamily& family);
GridForm gridForm(const CodecSpec& spec);

// Bytes of the blocks of `count` codes (FORMAT.md, "Payload of a grid codec").
size_t gridWordBytes(int bits, uint64_t count);

// Throw WireError: a code of tern that is none; a bit of the last block that belongs to no element and is not 0.
void expectThreeCodes(std::span<const std::byte> words, const std::string& codec);
void expectUnusedZero(std::span<const std::byte> words, int bits, uint64_t count, const std::string& codec,
                      bool rotated = false);

}  // namespace lowcomm
