#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/grid/grid_form.h"
#include "kernels/philox.h"

namespace lowcomm {

struct KernelTable;

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

// The loops over all elements. Every form of them gives the same bytes; called under FloatEnv.
struct ChannelKernels {
  // Least and largest element, and largest magnitude's bits, of the elements whose index is i modulo `period`.
  void (*range)(float* low, float* high, const float* x, size_t count, size_t period);
  void (*largest)(uint32_t* largest, const float* x, size_t count, size_t period);

  // sums[e mod length] += |y|, or y·y, y = x[e]·down[e mod period], in ascending order; length is a multiple of period.
  void (*sums)(float* sums, size_t length, const float* x, const float* down, size_t count, size_t period,
               bool squares);

  // The codes of all elements to `words`. False when an element is NaN or infinite (not found around 0).
  bool (*encode)(std::byte* words, const float* x, size_t count, const ChannelScales& scales, const GridForm& form,
                 GridRule rule, int bits, const PhiloxKey& key);

  // y[e] = base + step·code, around 0 (code - base)·step, or y[e] += that.
  void (*decode)(float* y, const std::byte* words, size_t count, const float* base, const float* step, size_t period,
                 bool centred, bool add, int bits);
};

// The whole of an encode and a decode: metadata of all channels in their order to or from `meta`, codes to or from
// `words`. `count` is a multiple of `channels` and not 0; form.bucket is not read. Under FloatEnv; they allocate.
// False as KernelTable::encode_grid.
bool encodeChannels(const KernelTable& table, std::byte* meta, std::byte* words, const float* x, size_t count,
                    size_t channels, const GridForm& form, GridRule rule, int bits, const PhiloxKey& key);
void decodeChannels(const KernelTable& table, float* y, const std::byte* meta, const std::byte* words, size_t count,
                    size_t channels, const GridForm& form, bool centred, bool add, int bits);

}  // namespace lowcomm
