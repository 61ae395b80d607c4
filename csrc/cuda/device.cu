#include "cuda/device.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "cuda/launch.cuh"

namespace lowcomm::cuda {

int deviceCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

void check(cudaError_t status, const char* doing, int device) {
  if (status == cudaSuccess) return;
  throw CudaError(std::string(doing) + " on CUDA device " + std::to_string(device) + ": expected cudaSuccess, got " +
                      cudaGetErrorName(status) + " (" + std::to_string(static_cast<int>(status)) +
                      "): " + cudaGetErrorString(status),
                  static_cast<int>(status));
}

DeviceScope::DeviceScope(int device, const char* doing) {
  int before = -1;
  check(cudaGetDevice(&before), doing, device);
  if (before == device) return;
  check(cudaSetDevice(device), doing, device);
  before_ = before;
}

DeviceScope::~DeviceScope() {
  // Nothing to throw from a destructor: a device that was current a moment ago can be made so again.
  if (before_ >= 0) static_cast<void>(cudaSetDevice(before_));
}

unsigned gridOf(uint64_t wanted, int device, const char* doing) {
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), doing, device);
  constexpr uint64_t kBlocksAProcessor = 64;
  return static_cast<unsigned>(std::min(wanted, static_cast<uint64_t>(processors) * kBlocksAProcessor));
}

}  // namespace lowcomm::cuda
