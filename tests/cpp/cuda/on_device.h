#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <span>
#include <stdexcept>
#include <vector>

#include "base/dtype.h"
#include "base/narrow_float.h"

namespace lowcomm::test {

inline void must(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// An array on the current device, of exactly its size: what lies past it is an address error to a sanitizer.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(std::span<const T> host) : count_(host.size()) {
    must(cudaMalloc(&at_, bytes()));
    if (count_ > 0) must(cudaMemcpy(at_, host.data(), bytes(), cudaMemcpyDefault));
  }
  OnDevice(size_t count, T value) : OnDevice(std::span<const T>(std::vector<T>(count, value))) {}
  ~OnDevice() { static_cast<void>(cudaFree(at_)); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  T* data() { return static_cast<T*>(at_); }

  // Waits for the device.
  std::vector<T> host() const {
    must(cudaDeviceSynchronize());
    std::vector<T> out(count_);
    if (count_ > 0) must(cudaMemcpy(out.data(), at_, bytes(), cudaMemcpyDefault));
    return out;
  }

 private:
  size_t bytes() const { return count_ * sizeof(T); }

  size_t count_;
  void* at_ = nullptr;
};

// Values as elements of a type, in bytes.
inline std::vector<std::byte> elementsOf(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * itemBytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = dtype == DType::float16 ? floatToFloat16(values[i]) : floatToBfloat16(values[i]);
    const void* from = dtype == DType::float32 ? static_cast<const void*>(&values[i]) : &half;
    std::memcpy(bytes.data() + i * itemBytes(dtype), from, itemBytes(dtype));
  }
  return bytes;
}

}  // namespace lowcomm::test
