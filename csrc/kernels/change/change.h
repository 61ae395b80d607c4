#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/grid/grid_form.h"
#include "kernels/philox.h"

namespace lowcomm {

// Grid codecs applied to what changed of a memory m since it was written (FusedCodec::encodeDelta): subtracting,
// encoding, decoding and adding in one pass over x and m. Groups of a block, or of a bucket where that is more, go
// through the first-level cache: as one is quantized, the next one is read, row by row, so that memory and arithmetic
// are busy together.
inline constexpr uint32_t kMostChangeBucket = 1024;

// Every form of them gives the same bytes and values, those of the loops of KernelTable one after the other; called
// under FloatEnv. `count` is a multiple of 512 and of form.bucket, which is at most kMostChangeBucket; meta, words,
// block and key are those of KernelTable::encode_grid. `after` may be `before`, else they do not overlap; both are of
// one type, of which a sum is the nearest value, held to the type's largest number.
enum class MemoryType : uint8_t { float32, float16, bfloat16 };
inline constexpr int kMemoryTypes = 3;

struct ChangeKernels {
  // [memory's type][rule] Encodes x - before; after = before + what that decodes to. Returns how many elements are
  // done: those before the group in which one is refused, for which encode_grid would return false. From there on
  // `after` is as it was, but for that group, where it is without meaning; in place, encode_grid would refuse the same
  // of its elements again.
  using Encode = size_t (*)(std::byte* meta, std::byte* words, const float* x, const void* before, void* after,
                            size_t count, const GridForm& form, int bits, uint64_t block, const PhiloxKey& key);
  Encode encode[kMemoryTypes][kGridRules];

  // [memory's type][around 0] y = before + what a payload decodes to; after = the same sum in the memory's type.
  using Decode = void (*)(float* y, const void* before, void* after, const std::byte* meta, const std::byte* words,
                          size_t count, const GridForm& form, int bits);
  Decode decode[kMemoryTypes][2];
};

}  // namespace lowcomm
