// The real sources of csrc/cuda, compiled for the host.
#include "cuda/accumulate.cu"
#include "cuda/device.cu"
#include "cuda/grid.cu"
#include "cuda/grid_encode.cuh"
#include "cuda/noise.cu"
#include "cuda/run_kernels.cu"
#include "cuda/token_rows.cu"
