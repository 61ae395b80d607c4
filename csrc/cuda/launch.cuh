#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "cuda/device.h"

namespace lowcomm::cuda {

// Throws CudaError: "<doing> on CUDA device 3: expected cudaSuccess, got cudaErrorX (n): CUDA's text".
void check(cudaError_t status, const char* doing, int device);

// Makes a device the calling thread's until the end of the scope, then gives the thread its own back.
class DeviceScope {
 public:
  DeviceScope(int device, const char* doing);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = -1;
};

// Thread blocks for `wanted` of them on the current device: enough to fill it several times over, so that the last ones
// to finish are few; kernels stride over the rest. Thread blocks are counted in 32 bits, work in 64.
unsigned gridOf(uint64_t wanted, int device, const char* doing);

// kernel<<<blocks, threads, 0, place.stream>>>(args...), in the form that is an ordinary function call: a host compiler
// reads it too (tests/cpp/cuda/sim).
template <class... Params, class... Args>
void launch(const Place& place, const char* doing, void (*kernel)(Params...), unsigned blocks, unsigned threads,
            Args&&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = place.stream;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), doing, place.device);
}

}  // namespace lowcomm::cuda
