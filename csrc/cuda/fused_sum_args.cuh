#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "cuda/fused.h"
#include "cuda/grid_args.cuh"
#include "kernels/grid/grid_form.h"
#include "kernels/philox.h"

namespace lowcomm::cuda {

// What a sum is made of, in the memory of a kernel's parameters: too much for registers.
struct SumTerms {
  FusedTerm term[kMostTerms];
  uint32_t count, average_over;
  size_t pad, words;  // in every payload
  DType own;
};

// Enqueues the sum of a run that has elements. A file each instantiates it for grids from a bucket's minimum and for
// those around 0 (fused_sum_<kind>.cu), so that they compile beside each other.
template <bool kCentred>
void encodeSumAs(const Place& place, const char* doing, GridRule rule, const GridArgs<std::byte>& grid,
                 const SumTerms& terms, void* out, uint64_t block, const PhiloxKey& key);

}  // namespace lowcomm::cuda
