#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

#include "codec/error.h"
#include "codec/payload.h"
#include "codec/spec.h"
#include "cuda/grid.h"
#include "cuda/tile.cuh"

namespace lowcomm::cuda {

constexpr uint32_t kThreads = 128;  // of a thread block where warps work each for itself
constexpr uint32_t kWarps = kThreads / kWarp;

// A run and its payload as kernels see them. Byte is std::byte, const where the payload is read.
template <class Byte>
struct GridArgs {
  Byte* meta;   // base, step a bucket
  Byte* pad;    // zeros up to `words`
  Byte* words;  // the codes, 16-byte aligned
  uint64_t count;
  uint32_t pad_words, bits, bucket, bucket_log2;
  uint32_t* refused;
};

template <class Byte>
GridArgs<Byte> gridArgs(const char* doing, const GridRun& run, Byte* payload, uint32_t* refused) {
  const auto fail = [&](const char* what, const std::string& expected, const std::string& got) {
    return std::string(doing) + ": " + what + ": expected " + expected + ", got " + got;
  };
  if (run.bits < 1 || run.bits > 8) throw ValueError(fail("bits", "1...8", std::to_string(run.bits)));
  if (!isGridBucket(run.bucket)) throw ValueError(fail("bucket", kGridBuckets, std::to_string(run.bucket)));
  if (run.dtype != DType::float32 && run.dtype != DType::float16 && run.dtype != DType::bfloat16) {
    throw TypeError(fail("elements", "float32, float16 or bfloat16", dtypeName(run.dtype)));
  }
  if (const auto at = reinterpret_cast<uintptr_t>(payload); at % 16 != 0) {
    throw ValueError(fail("payload", "an address that is a multiple of 16", std::to_string(at % 16) + " more"));
  }
  const size_t meta = 8 * ((run.count + run.bucket - 1) / run.bucket), words = up64(meta);
  return {payload,
          payload + meta,
          payload + words,
          run.count,
          static_cast<uint32_t>((words - meta) / 4),
          static_cast<uint32_t>(run.bits),
          run.bucket,
          static_cast<uint32_t>(std::countr_zero(run.bucket)),
          refused};
}

// Elements of the block that starts at element `start`: 512 but for the last.
__device__ inline uint32_t elementsOf(uint64_t start, uint64_t count) {
  return count - start < kBlock ? static_cast<uint32_t>(count - start) : kBlock;
}

}  // namespace lowcomm::cuda
