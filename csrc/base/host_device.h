#pragma once

// Before an inline function that CUDA kernels share with the loops of the CPU. Elsewhere than in a .cu it says nothing.
#ifdef __CUDACC__
#define LOWCOMM_HOST_DEVICE __host__ __device__
#else
#define LOWCOMM_HOST_DEVICE
#endif
