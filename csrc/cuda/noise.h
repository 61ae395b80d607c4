#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "cuda/device.h"
#include "kernels/noise/noise.h"

namespace lowcomm::cuda {

// lowcomm::addNoise for elements that lie on a CUDA device, with the same bits: out[i] = x[i] + sum over the terms of
// factor·z(key)[first + i], or the sum alone where x is null, in one pass. FORMAT.md, "Perturbations".
//
// dtype: float32; float16 and bfloat16, with an x. out may be x, and else does not overlap it. All pointers, `terms`
// too (term_count of them, 1 or more), are to memory that `place.device` can reach, and stay the caller's until the
// stream has passed the call. `stream` takes the place of the stream in every term's key: one list of terms serves all
// tensors of a model, which differ in it alone. Wide loads and stores need out and x - first aligned to 16 bytes (the
// others: 8).
//
// Throws ValueError, TypeError, and CudaError where the runtime refuses the launch; nothing is enqueued then. Executed
// by the tests' simulator only so far, as all that is here (cuda/grid.h).
void addNoise(const Place& place, Noise noise, void* out, const void* x, DType dtype, uint64_t first, uint64_t count,
              const NoiseTerm* terms, size_t term_count, uint32_t stream);

// addNoise() for up to kCarriedTerms terms in host memory, which are read before it returns: they are copied with the
// launch.
inline constexpr size_t kCarriedTerms = 64;
void addNoise(const Place& place, Noise noise, void* out, const void* x, DType dtype, uint64_t first, uint64_t count,
              std::span<const NoiseTerm> terms, uint32_t stream);

}  // namespace lowcomm::cuda
