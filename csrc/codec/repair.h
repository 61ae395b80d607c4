#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/dtype.h"

namespace lowcomm {

// What `nonfinite=saturate` and `nonfinite=poison` do to elements that the codec does not take, those that are not
// finite or `limit` (finiteLimit) or more in magnitude, before they are encoded like any others. Rare, so it is a pass
// of its own over a copy, and the loops know nothing of it. x: `count` elements of float32, float16 or bfloat16 from
// the start of a bucket, changed in place.

// NaN becomes 0; what is too large the largest magnitude of its bucket that is not, with its own sign (0 where there is
// none).
void saturate(void* x, DType dtype, uint64_t count, uint32_t bucket, float limit);

// Sets every element of a bucket with one that the codec does not take to 0. Returns those buckets' numbers, ascending.
std::vector<uint64_t> blank(void* x, DType dtype, uint64_t count, uint32_t bucket, float limit);

// The same for buckets that are the channels of a tensor [T, channels]; blankChannels returns the channels' numbers.
void saturateChannels(void* x, DType dtype, uint64_t count, uint32_t channels);
std::vector<uint64_t> blankChannels(void* x, DType dtype, uint64_t count, uint32_t channels);

// The same for codecs without buckets, which take any finite element: NaN becomes 0, an infinity the type's largest
// finite number with its sign; blankEach sets them to 0 and returns their numbers, ascending.
void saturateEach(void* x, DType dtype, uint64_t count);
std::vector<uint64_t> blankEach(void* x, DType dtype, uint64_t count);

// Sets the codes of elements [from, from + count) to 0, in the blocks that hold them (FORMAT.md, "Payload").
void clearCodes(std::span<std::byte> words, int bits, uint64_t from, uint64_t count);

}  // namespace lowcomm
