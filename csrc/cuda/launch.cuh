#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/narrow_float.h"
#include "codec/nonfinite.h"
#include "codec/spec.h"
#include "cuda/device.h"

// How the host side of a call goes: the run and its memory are checked, the device is made current, kernels are
// launched.

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

// Throws ValueError for an address that vector loads cannot take.
inline void expectAligned(const char* doing, const char* what, const void* at) {
  if (const auto over = reinterpret_cast<uintptr_t>(at) % 16; over != 0) {
    throw ValueError(std::string(doing) + ": " + what + ": expected an address that is a multiple of 16, got " +
                     std::to_string(over) + " more");
  }
}

// Throws ValueError or TypeError for a run that a call cannot take: another codec than `expected` says (`is_one` is
// false), options that do not fit each other, elements of another type, a misaligned payload.
inline void checkRun(const char* doing, const CodecSpec& codec, bool is_one, const char* expected, DType dtype,
                     const void* payload) {
  const std::string call(doing);
  if (!is_one) throw ValueError(call + ": codec: expected " + expected + ", got " + codec.str());
  if (const auto why = misfit(codec)) throw ValueError(call + ": " + *why);
  if (!isCoded(dtype)) {
    throw TypeError(call + ": elements: expected float32, float16 or bfloat16, got " + dtypeName(dtype));
  }
  expectAligned(doing, "payload", payload);
}

}  // namespace lowcomm::cuda
