#pragma once

#include "kernels/isa/table.h"

namespace lowcomm {

// The kernels this process uses: the fastest form this machine runs, or the one that the environment variable
// LOWCOMM_KERNELS names (scalar, avx2, avx512, neon). Read once. Throws ValueError for a name that is none, or that
// this build or machine lacks: a benchmark that asked for one form must not measure another.
const KernelTable& kernels();

// Its name, for `info` and the benchmarks.
const char* kernelsName();

// The choice behind kernels(): `requested` null or empty means the fastest. Throws as kernels().
const KernelTable& chooseKernels(const char* requested);

}  // namespace lowcomm
