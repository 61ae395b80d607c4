#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/grid/grid_form.h"
#include "kernels/philox.h"

namespace lowcomm {

// Grid codecs whose buckets are the channels of a tensor [T, C] (FORMAT.md, "Channels"): element e belongs to bucket
// e mod C. A tensor is encoded as a whole: its first element starts block 0.
//
// The numbers of a channel are repeated in memory with a period that is a multiple of C and of 16, so that a row of 16
// lanes never wraps: an array of `period` floats has channel i mod C at i.
struct ChannelScales {
  const float* base;  // null: a grid around 0, whose inverse is all there is
  const float* inverse;
  const float* magic;  // null: the same for all
  size_t period;
};

// The whole of an encode and a decode: metadata of all channels in their order to or from `meta`, codes to or from
// `words`. `count` is a multiple of `channels` and not 0; form.bucket is not read. Under FloatEnv; they allocate.
// False as KernelTable::encode_grid.
bool encodeChannels(std::byte* meta, std::byte* words, const float* x, size_t count, size_t channels,
                    const GridForm& form, GridRule rule, int bits, const PhiloxKey& key);
void decodeChannels(float* y, const std::byte* meta, const std::byte* words, size_t count, size_t channels,
                    const GridForm& form, bool centred, bool add, int bits);

}  // namespace lowcomm
