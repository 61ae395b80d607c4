#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "cuda/device.h"

namespace lowcomm::cuda {

// A sum of float32, float16 or bfloat16 elements in float32, on a CUDA device: the bits of reduceAssign, reduceInto and
// reduceFinish (kernels/reduce.h) for ReduceKind::sum, except for those of a NaN before the sum is finished. Pointers
// are to memory that `place.device` can reach, aligned to their type. Throws TypeError for other element types,
// CudaError where the runtime refuses the launch. One kernel a call; nothing is enqueued for no elements. Executed by
// the tests' simulator only so far (cuda/grid.h).

// acc = x where it `starts` the sum, else acc += x.
void accumulate(const Place& place, float* acc, const void* x, DType dtype, uint64_t count, bool starts);

// out = acc rounded to `dtype`, then, with average_over > 0, that divided by it. out may be acc where dtype is float32.
void finishSum(const Place& place, void* out, const float* acc, DType dtype, uint64_t count, uint32_t average_over);

// Whether this build has code that runs on that device: its architectures are those of CUDAARCHS. Does not throw.
bool runsOn(int device);

}  // namespace lowcomm::cuda
