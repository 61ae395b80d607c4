#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/codebook.cuh"
#include "cuda/element.cuh"
#include "cuda/grid_args.cuh"
#include "kernels/grid/grid_form.h"
#include "kernels/philox.h"

namespace lowcomm::cuda {

template <class T>
struct EncodeArgs {
  GridArgs<std::byte> grid;
  const T* x;
  uint64_t block;  // number of the run's first block in the tensor
  PhiloxKey key;
};

// Enqueues the encode of a run that has elements. `thresholds` are those of levels and gauss, else null.
template <class T>
void encodeRun(const Place& place, const EncodeArgs<T>& args, GridRule rule, const BookArgs<true>* thresholds);

}  // namespace lowcomm::cuda
