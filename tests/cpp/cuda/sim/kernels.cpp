// The real sources of csrc/cuda, compiled for the host.
#include "cuda/cast.cu"
#include "cuda/device.cu"
#include "cuda/grid_decode.cu"
#include "cuda/grid_encode.cu"
#include "cuda/grid_encode_bfloat16.cu"
#include "cuda/grid_encode_float16.cu"
#include "cuda/grid_encode_float32.cu"
#include "cuda/noise.cu"
