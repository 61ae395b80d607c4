#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "base/float_env.h"
#include "cuda/grid.h"
#include "kernels/codebook/codebook.h"

namespace lowcomm::cuda {

// Up to 256 numbers of a codebook (kernels/codebook/codebook.h). They travel among a kernel's arguments, so that a call
// needs no memory of the caller's and waits for no copy, and are looked up in shared memory: the bank that arguments
// lie in serves threads that ask for different numbers one after another.
template <bool kUsed>
struct BookArgs {};  // of a codec without a codebook: nothing
template <>
struct BookArgs<true> {
  float4 four[64];
};

// The book in shared memory; null without a book. Called by all threads of a thread block: it contains a barrier.
template <bool kUsed>
__device__ inline const float* shareBook(const BookArgs<kUsed>& book, uint32_t bits) {
  if constexpr (kUsed) {
    __shared__ float4 shared[64];
    for (uint32_t i = threadIdx.x; 4 * i < 1u << bits; i += blockDim.x)
      shared[i] = book.four[i];
    __syncthreads();
    return reinterpret_cast<const float*>(shared);
  } else {
    return nullptr;
  }
}

// The step down from a node of a tree of thresholds: 1 is its root, 2·i and 2·i + 1 are below i. After `bits` steps
// from the root, the lowest `bits` bits count the thresholds strictly below t; a NaN is above none.
__device__ inline uint32_t nodeBelow(const float* tree, uint32_t node, float t) {
  return 2 * node + (t > tree[node] ? 1 : 0);
}

// ---- on the host ----

// The codebook of a run that gridArgs took. `made` holds that of a level table, which has to be made.
inline const Codebook& codebookOf(const GridRun& run, Codebook& made) {
  if (run.codec.id == CodecId::gauss) return gaussCodebook(run.codec.bits);
  FloatEnv env;
  makeLevels(made, run.codec.bits, run.levels->values().data());
  return made;
}

inline BookArgs<true> bookArgs(const float* numbers) {
  BookArgs<true> book;
  static_assert(sizeof(book) == 256 * sizeof(float));
  std::memcpy(&book, numbers, sizeof(book));
  return book;
}

inline BookArgs<true> levelArgs(const GridRun& run) {
  Codebook made;
  return bookArgs(codebookOf(run, made).level);
}

// The thresholds as a tree, whose nodes of equal depth stand side by side: the first 32 of a depth lie in banks of
// shared memory of their own, where in ascending order 32 of a depth would share four banks.
inline BookArgs<true> thresholdArgs(const GridRun& run) {
  Codebook made;
  const Codebook& book = codebookOf(run, made);
  float tree[256] = {};
  for (uint32_t depth = 0; depth < run.codec.bits; ++depth) {
    const uint32_t nodes = 1u << depth, apart = 1u << (run.codec.bits - depth);
    for (uint32_t i = 0; i < nodes; ++i)
      tree[nodes + i] = book.threshold[i * apart + apart / 2 - 1];
  }
  return bookArgs(tree);
}

}  // namespace lowcomm::cuda
