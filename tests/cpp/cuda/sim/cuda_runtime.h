// The part of CUDA that csrc/cuda and its tests use, on the host: found in the toolkit's place by whatever includes
// <cuda_runtime.h> with this folder in front. Kernels run as they stand, one fiber a CUDA thread, one block after
// another; "device" memory is the heap's, so AddressSanitizer sees a wrong address and UBSan a misaligned one.
//
// Not simulated: order of memory between warps, several blocks at once, streams (every call is done when it returns),
// code under __CUDA_ARCH__, and what only a device has: its clock and its capacity.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __shared__ static  // blocks run one after another
#define __launch_bounds__(...)
#define __grid_constant__

struct uint3 {
  unsigned x = 0, y = 0, z = 0;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

template <class T>
void __stwb(T* at, T value) {
  *at = value;
}

inline void __syncthreads() {
  lowcomm::sim::syncBlock();
}

inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>(((uint64_t{high} << 32 | low) << (by % 32)) >> 32);
}

inline void __syncwarp() {
  static_cast<void>(lowcomm::sim::exchangeInWarp(0, 0));
}

template <class T>
T lowcommSimExchange(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= 8);
  if (mask != 0xffffffffu) std::abort();  // parts of warps are not simulated
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = lowcomm::sim::exchangeInWarp(bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
T __shfl_sync(unsigned mask, T value, unsigned source) {
  return lowcommSimExchange(mask, value, source % 32);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned other) {
  return lowcommSimExchange(mask, value, lowcomm::sim::laneInWarp() ^ other);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by) {
  const unsigned lane = lowcomm::sim::laneInWarp();
  return lowcommSimExchange(mask, value, lane + by < 32 ? lane + by : lane);
}

inline uint32_t __ballot_sync(unsigned mask, bool mine) {
  if (mask != 0xffffffffu) std::abort();
  return lowcomm::sim::ballotInWarp(mine);
}
inline int __popc(uint32_t bits) {
  return __builtin_popcount(bits);
}

// Threads go on one at a time: nothing comes between.
template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = before + value;
  return before;
}
template <class T>
T atomicMax(T* at, T value) {
  const T before = *at;
  if (value > before) *at = value;
  return before;
}
template <class T>
T atomicOr(T* at, T value) {
  const T before = *at;
  *at = before | value;
  return before;
}

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidDevice = 101 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
struct CUstream_st;
using cudaStream_t = CUstream_st*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

inline int lowcommSimDevice = 0;
constexpr int kLowcommSimDevices = 2;

inline const char* cudaGetErrorName(cudaError_t status) {
  return status == cudaErrorInvalidDevice ? "cudaErrorInvalidDevice" : "cudaErrorInvalidValue";
}
inline const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorInvalidDevice ? "invalid device ordinal" : "invalid argument";
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = kLowcommSimDevices;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = lowcommSimDevice;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kLowcommSimDevices) return cudaErrorInvalidDevice;
  lowcommSimDevice = device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;  // processors: few, so that launches of a few hundred blocks stride
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** at, size_t bytes) {
  *at = std::malloc(bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* at) {
  std::free(at);
  return cudaSuccess;
}
inline cudaError_t cudaMallocHost(void** at, size_t bytes) {
  return cudaMalloc(at, bytes);
}
inline cudaError_t cudaFreeHost(void* at) {
  return cudaFree(at);
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  std::memset(at, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(at, value, bytes);
}
inline cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = 0;  // none to spare: what needs gigabytes is for a device
  return cudaSuccess;
}
constexpr unsigned cudaStreamNonBlocking = 1;
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}

struct cudaFuncAttributes {};
template <class F>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, F*) {
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  if (config->gridDim.x == 0 || config->blockDim.x == 0 || config->blockDim.x > 1024) return cudaErrorInvalidValue;
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  for (unsigned b = 0; b < gridDim.x; ++b) {
    lowcomm::sim::runBlock(
        blockDim.x, /*backwards=*/b % 2 == 1,
        [&](unsigned t) {
          blockIdx.x = b;
          threadIdx.x = t;
        },
        [&] { kernel(args...); });
  }
  return cudaSuccess;
}
