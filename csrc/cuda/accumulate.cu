#include "cuda/accumulate.h"

#include <cuda_runtime.h>

#include <string>

#include "base/error.h"
#include "codec/element.h"
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

unsigned blocksFor(uint64_t count, int device, const char* doing) {
  return gridOf((count + kThreads - 1) / kThreads, device, doing);
}

template <class T>
void accumulateAs(const Place& place, float* acc, const void* x, uint64_t count, bool starts) {
  constexpr const char* kDoing = "accumulate";
  const DeviceScope scope(place.device, kDoing);
  launch(place, kDoing, accumulateByThread<T>, blocksFor(count, place.device, kDoing), kThreads, acc,
         static_cast<const T*>(x), count, starts);
}

template <class T>
void finishAs(const Place& place, void* out, const float* acc, uint64_t count, uint32_t average_over) {
  constexpr const char* kDoing = "finish sum";
  const DeviceScope scope(place.device, kDoing);
  launch(place, kDoing, finishByThread<T>, blocksFor(count, place.device, kDoing), kThreads, static_cast<T*>(out), acc,
         count, average_over);
}

void expectCoded(const char* doing, DType dtype) {
  if (isCoded(dtype)) return;
  throw TypeError(std::string(doing) + ": elements: expected float32, float16 or bfloat16, got " + dtypeName(dtype));
}

}  // namespace

// Elements may be NaN here, under nonfinite=poison and in exact parts: float16 by the form that keeps it.
void accumulate(const Place& place, float* acc, const void* x, DType dtype, uint64_t count, bool starts) {
  expectCoded("accumulate", dtype);
  if (count == 0) return;
  switch (dtype) {
    case DType::float16:
      return accumulateAs<AnyFloat16>(place, acc, x, count, starts);
    case DType::bfloat16:
      return accumulateAs<Bfloat16>(place, acc, x, count, starts);
    default:
      return accumulateAs<float>(place, acc, x, count, starts);
  }
}

void finishSum(const Place& place, void* out, const float* acc, DType dtype, uint64_t count, uint32_t average_over) {
  expectCoded("finish sum", dtype);
  if (count == 0) return;
  switch (dtype) {
    case DType::float16:
      return finishAs<Float16>(place, out, acc, count, average_over);
    case DType::bfloat16:
      return finishAs<Bfloat16>(place, out, acc, count, average_over);
    default:
      return finishAs<float>(place, out, acc, count, average_over);
  }
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
