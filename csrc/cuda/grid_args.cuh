#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "codec/grid.h"
#include "codec/nonfinite.h"
#include "codec/spec.h"
#include "cuda/codebook.cuh"
#include "cuda/grid.h"
#include "cuda/launch.cuh"
#include "cuda/tile.cuh"
#include "kernels/grid/grid_form.h"
#include "kernels/grid/grid_rules.h"
#include "kernels/philox.h"

namespace lowcomm::cuda {

// A run and its payload as kernels see them. Byte is std::byte, const where the payload is read.
template <class Byte>
struct GridArgs {
  Byte* meta;           // a bucket's base and step, or its step alone (centred)
  Byte* pad;            // zeros up to `words`
  Byte* words;          // the codes, 16-byte aligned
  uint64_t count;       // elements
  uint64_t codes;       // of them; where rotated, of whole blocks
  uint32_t pad_halves;  // of two bytes
  uint32_t bits, bucket_log2;
  GridForm form;   // its book is the host's: kernels have theirs next to this
  uint32_t limit;  // bits of the least magnitude that is refused
  Nonfinite nonfinite;
  bool rotated, of_units;  // of_units: its blocks are rotated as those of units
  uint32_t* refused;
};

// The turnOf() word of the block that begins with element `at`; 0 where blocks are not of units.
template <class Byte>
__device__ inline uint32_t turnAt(const GridArgs<Byte>& grid, uint64_t at) {
  return grid.of_units ? turnOf(at / kBlock) : 0;
}

template <class Byte>
GridArgs<Byte> gridArgs(const char* doing, const GridRun& run, Byte* payload, uint32_t* refused) {
  const auto fail = [&](const char* what, const std::string& expected, const std::string& got) {
    return std::string(doing) + ": " + what + ": expected " + expected + ", got " + got;
  };
  const CodecSpec& codec = run.codec;
  const GridFamily* family = gridFamily(codec.id);
  if (family != nullptr && codec.axis != Axis::flat) throw ValueError(fail("axis", "none", "channel"));
  if (family != nullptr && codec.bucket == kTensorBucket) {
    throw ValueError(fail("bucket", gridBuckets(isRotated(codec)), "tensor"));
  }
  if (codec.unit != 0 && codec.unit % codec.bucket != 0) {
    throw ValueError(
        fail("unit", "a multiple of the bucket, " + std::to_string(codec.bucket), std::to_string(codec.unit)));
  }
  checkRun(doing, codec, family != nullptr, "a grid codec", run.dtype, payload);
  const size_t levels = needsTable(codec) ? size_t{1} << codec.bits : 0;
  if (const size_t got = run.levels ? run.levels->values().size() : 0; got != levels) {
    const auto values = [](size_t count) { return count ? std::to_string(count) + " values" : std::string("none"); };
    throw ValueError(fail("level table", values(levels), values(got)));
  }
  const size_t scales = family->centred ? 1 : 2, scale_bytes = codec.meta == Meta::bf16 ? 2 : 4;
  const size_t meta = scales * scale_bytes * ((run.count + codec.bucket - 1) / codec.bucket), words = up64(meta);
  const bool rotated = isRotated(codec);
  GridForm form = gridForm(codec);
  if (const uint32_t held = run.count % kBlock; rotated && held > 0 && held < kLanes) {
    form.absent = kBlock / kLanes * (kLanes - held);
  }
  return {payload,
          payload + meta,
          payload + words,
          run.count,
          rotated ? (run.count + kBlock - 1) / kBlock * kBlock : run.count,
          static_cast<uint32_t>((words - meta) / 2),
          codec.bits,
          static_cast<uint32_t>(std::countr_zero(codec.bucket)),
          form,
          floatBits(finiteLimit(codec)),
          codec.nonfinite,
          rotated,
          codec.unit != 0,
          refused};
}

// A run that is encoded.
template <class T>
struct EncodeArgs {
  GridArgs<std::byte> grid;
  const T* x;
  uint64_t block;  // number of the run's first block in the tensor
  PhiloxKey key;
};

// Elements of the block that starts at element `start`: 512 except for the last. Its codes, given how many the run has.
__device__ inline uint32_t elementsOf(uint64_t start, uint64_t count) {
  return count - start < kBlock ? static_cast<uint32_t>(count - start) : kBlock;
}

struct BucketMeta {
  float base, step;  // base: 0 where none is sent
};

// A bucket's metadata, by one store and one load.
template <bool kCentred>
__device__ inline void storeSent(const GridArgs<std::byte>& grid, uint64_t bucket, const BucketMeta& sent) {
  if (kCentred) {
    if (grid.form.bf16) {
      reinterpret_cast<uint16_t*>(grid.meta)[bucket] = static_cast<uint16_t>(floatBits(sent.step) >> 16);
    } else {
      reinterpret_cast<float*>(grid.meta)[bucket] = sent.step;
    }
  } else if (grid.form.bf16) {
    reinterpret_cast<uint32_t*>(grid.meta)[bucket] = floatBits(sent.base) >> 16 | (floatBits(sent.step) & kBf16Mask);
  } else {
    reinterpret_cast<float2*>(grid.meta)[bucket] = float2{sent.base, sent.step};
  }
}

template <bool kCentred>
__device__ inline BucketMeta loadSent(const GridArgs<const std::byte>& grid, uint64_t bucket) {
  if (kCentred) {
    if (!grid.form.bf16) return {0, reinterpret_cast<const float*>(grid.meta)[bucket]};
    return {0, floatOf(uint32_t{reinterpret_cast<const uint16_t*>(grid.meta)[bucket]} << 16)};
  }
  if (grid.form.bf16) {
    const uint32_t both = reinterpret_cast<const uint32_t*>(grid.meta)[bucket];
    return {floatOf(both << 16), floatOf(both & kBf16Mask)};
  }
  const float2 both = reinterpret_cast<const float2*>(grid.meta)[bucket];
  return {both.x, both.y};
}

// Enqueues the encode of a run that has elements (grid_encode.cuh). `thresholds` are those of levels and gauss, else
// null.
template <class T>
void encodeRun(const Place& place, const EncodeArgs<T>& args, GridRule rule, const BookArgs<true>* thresholds);

}  // namespace lowcomm::cuda
