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

inline constexpr uint32_t kPoisonBits = 0x7fc00000u;  // the quiet NaN that a poisoned bucket sends

GridRule gridRuleOf(const GridFamily& family);

// The constants of a codec's loops; its bucket is spec.bucket.
GridForm gridFormOf(const CodecSpec& spec);

// Bytes of the blocks of `count` codes (FORMAT.md, "Payload of a grid codec").
size_t gridWordBytes(int bits, uint64_t count);

// Throw WireError: a code of tern that is none; a bit of the last block that belongs to no element and is not 0.
void expectThreeCodes(std::span<const std::byte> words, const std::string& codec);
void expectUnusedZero(std::span<const std::byte> words, int bits, uint64_t count, const std::string& codec);

}  // namespace lowcomm
