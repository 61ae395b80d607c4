#include "cuda/accumulate.h"

#include <cuda_runtime.h>

#include <string>

#include "base/error.h"
#include "base/narrow_float.h"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/tile.cuh"

namespace lowcomm::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads) accumulateByThread(float* acc, const T* x, uint64_t count, bool starts) {
  const uint64_t stride = uint64_t{gridDim.x} * kThreads;
  for (uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride) {
    const float value = toFloat(x[i]);
    acc[i] = starts ? value : acc[i] + value;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    finishByThread(T* out, const float* acc, uint64_t count, uint32_t average_over) {
  const uint64_t stride = uint64_t{gridDim.x} * kThreads;
  const float divisor = static_cast<float>(average_over);
  for (uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride) {
    T rounded;
    fromFloat(rounded, settled(acc[i]));
    if (average_over > 0) fromFloat(rounded, settled(toFloat(rounded) / divisor));
    out[i] = rounded;
  }
}

// Throws TypeError. Calls f() on the device, where there are elements.
template <class F>
void onElements(const Place& place, const char* doing, DType dtype, uint64_t count, F&& f) {
  if (!isCoded(dtype)) {
    throw TypeError(std::string(doing) + ": elements: expected float32, float16 or bfloat16, got " + dtypeName(dtype));
  }
  if (count == 0) return;
  const DeviceScope scope(place.device, doing);
  f(gridOf((count + kThreads - 1) / kThreads, place.device, doing));
}

}  // namespace

void accumulate(const Place& place, float* acc, const void* x, DType dtype, uint64_t count, bool starts) {
  constexpr const char* kDoing = "accumulate";
  onElements(place, kDoing, dtype, count, [&](unsigned blocks) {
    const auto enqueue = [&](const auto* x, auto kernel) {
      launch(place, kDoing, kernel, blocks, kThreads, acc, x, count, starts);
    };
    // Elements may be NaN here, under nonfinite=poison and in exact parts: float16 by the form that keeps it.
    if (dtype == DType::float16) return enqueue(static_cast<const AnyFloat16*>(x), accumulateByThread<AnyFloat16>);
    if (dtype == DType::bfloat16) return enqueue(static_cast<const Bfloat16*>(x), accumulateByThread<Bfloat16>);
    enqueue(static_cast<const float*>(x), accumulateByThread<float>);
  });
}

void finishSum(const Place& place, void* out, const float* acc, DType dtype, uint64_t count, uint32_t average_over) {
  constexpr const char* kDoing = "finish sum";
  onElements(place, kDoing, dtype, count, [&](unsigned blocks) {
    withElements(dtype, out, [&]<class T>(T* out) {
      launch(place, kDoing, finishByThread<T>, blocks, kThreads, out, acc, count, average_over);
    });
  });
}

bool runsOn(int device) {
  try {
    const DeviceScope scope(device, "looking for kernels");
    cudaFuncAttributes attributes{};
    const bool runs = cudaFuncGetAttributes(&attributes, accumulateByThread<float>) == cudaSuccess;
    if (!runs) static_cast<void>(cudaGetLastError());  // or the next launch would report it
    return runs;
  } catch (const CudaError&) {
    return false;
  }
}

}  // namespace lowcomm::cuda
