#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "cuda/fused.h"
#include "cuda/grid_args.cuh"
#include "kernels/grid/grid_form.h"
#include "kernels/philox.h"

// The arguments that the calls of fused.h (fused.cu) hand to their kernels. CMake makes a file of instance.cu.in for
// each of them, so that they compile at the same time.

namespace lowcomm::cuda {

// Throws TypeError for a state of another type than its three.
void expectState(const char* doing, const FusedState& state);

enum class Change : uint8_t { delta, feedback };

// Enqueues encodeDelta or encodeFeedback of a run that has elements (fused_change.cuh).
template <Change kChange>
void encodeChange(const Place& place, const char* doing, const GridArgs<std::byte>& grid, const GridRun& run,
                  const void* x, const FusedState& state, uint64_t block, const PhiloxKey& key);

// The terms of a sum, in the memory of a kernel's parameters: too much for registers.
struct SumTerms {
  FusedTerm term[kMostTerms];
  uint32_t count, average_over;
  size_t pad, words;  // in every payload
  DType own;
};

// Enqueues the sum of a run that has elements, for grids from a bucket's minimum or for those around 0
// (fused_sum.cuh).
template <bool kCentred>
void encodeSumAs(const Place& place, const char* doing, GridRule rule, const GridArgs<std::byte>& grid,
                 const SumTerms& terms, void* out, uint64_t block, const PhiloxKey& key);

}  // namespace lowcomm::cuda
