#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "codec/spec.h"

namespace lowcomm {

// The treatment of elements that a codec does not take: those that are NaN, infinite, or of magnitude finiteLimit and
// more. x: `count` elements of float32, float16 or bfloat16.

// nonfinite=error: throws NonFiniteError for the first of them, counted from `first`. `of` ends the message.
void expectFinite(const CodecSpec& codec, const void* x, DType dtype, uint64_t first, uint64_t count,
                  const std::string& of = "");

// nonfinite=poison: sets all elements of a bucket to 0, in place, where one of them has a magnitude of `limit`
// (finiteLimit) or more. x starts with a bucket. Returns the numbers of these buckets, ascending. A codec without
// buckets has buckets of 1.
std::vector<uint64_t> blank(void* x, DType dtype, uint64_t count, uint32_t bucket, float limit);

// blank() for buckets that are the channels of a tensor [T, channels], with the limit of codecs that do not rotate.
std::vector<uint64_t> blankChannels(void* x, DType dtype, uint64_t count, uint32_t channels);

// Sets the codes of elements [from, from + count) to 0, in the blocks that hold them (FORMAT.md, "Payload").
void clearCodes(std::span<std::byte> words, int bits, uint64_t from, uint64_t count);

// Payloads and the metadata in them end on a multiple of 64 bytes: a cache line, and the alignment of what follows.
constexpr size_t up64(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

// A bit that carries nothing must be 0, so that one tensor has one payload and later versions may give it a meaning.
inline void expectZero(std::span<const std::byte> bytes, const std::string& codec, const char* what) {
  const auto bad = std::find_if(bytes.begin(), bytes.end(), [](std::byte b) { return b != std::byte{0}; });
  if (bad == bytes.end()) return;
  throw WireError(codec + ": " + what + ": expected 0, got " + std::to_string(std::to_integer<int>(*bad)) +
                  " at its byte " + std::to_string(bad - bytes.begin()));
}

template <typename Error>
void expectBytes(const std::string& codec, size_t expected, size_t got) {
  if (got != expected) {
    throw Error(codec + ": payload: expected " + std::to_string(expected) + " bytes, got " + std::to_string(got));
  }
}

}  // namespace lowcomm
