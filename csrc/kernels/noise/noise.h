#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "kernels/isa/table.h"
#include "kernels/philox.h"

namespace lowcomm {

// Perturbations of weights that any rank can make again from a seed (FORMAT.md, "Perturbations"): element e of a tensor
// has a number z[e], which depends on the key and on e alone. The gradient estimates that they serve travel as a byte
// each: Just One Byte, after MeZO (Malladi et al., Fine-Tuning Language Models with Just Forward Passes; NeurIPS 2023).
enum class Noise : uint8_t {
  gaussian,    // N(0, 1), by Box and Muller
  rademacher,  // +1 or -1
};

// factor·z(key).
struct NoiseTerm {
  PhiloxKey key;
  float factor = 1;
};

// The loops of one instruction set. Every form gives the same bits; called under FloatEnv.
//
// out[i] = x[i] + sum over the terms of factor·z(key)[first + i], or the sum alone where x is null, for i < count.
// `terms` are 1 or more; they are added in groups of four, the groups one after another, and x last. out may be x, and
// else does not overlap it. Neither function allocates.
struct NoiseKernels {
  using Add = void (*)(float* out, const float* x, uint64_t first, size_t count, const NoiseTerm* terms,
                       size_t term_count);
  Add gaussian;
  Add rademacher;
};

// The same sums for float32, float16 or bfloat16 elements, `first` counted in the tensor: added in fp32 in one pass
// over the elements, and rounded once. Without terms out = x, or 0. float32: x and out as above; the others: neither is
// null. The update of a weight, w -= sum of a·z, is that with -a for a: the same bits.
void addNoise(const KernelTable& form, Noise noise, void* out, const void* x, DType dtype, uint64_t first,
              uint64_t count, std::span<const NoiseTerm> terms);

// The key's seed for a sample's perturbation: splitmix64 over the four numbers.
uint64_t noiseSeed(uint64_t run_seed, uint64_t machine, uint64_t iteration, uint64_t sample);

}  // namespace lowcomm
