#pragma once

// Memory of the device, and the time that what is enqueued takes there.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <stdexcept>
#include <vector>

namespace lowcomm {

inline void must(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// Device memory, filled with zeros.
class Memory {
 public:
  explicit Memory(size_t bytes) {
    must(cudaMalloc(&at_, bytes));
    must(cudaMemset(at_, 0, bytes));
  }
  ~Memory() { static_cast<void>(cudaFree(at_)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* get() const { return at_; }

 private:
  void* at_ = nullptr;
};

// Milliseconds on the device of what `enqueue` puts on the default stream.
inline float milliseconds(const std::function<void()>& enqueue) {
  struct Event {
    cudaEvent_t event;
    Event() { must(cudaEventCreate(&event)); }
    ~Event() { static_cast<void>(cudaEventDestroy(event)); }
  };
  const Event start, end;
  must(cudaEventRecord(start.event));
  enqueue();
  must(cudaEventRecord(end.event));
  must(cudaEventSynchronize(end.event));
  float ms;
  must(cudaEventElapsedTime(&ms, start.event, end.event));
  return ms;
}

struct Measurement {
  double gigabytes_a_second;   // read and written, by the median time
  double least, median, most;  // percent of the copy that ran just before
};

// A copy of half of `bytes` reads and writes as many as `enqueue` does.
inline Measurement measure(size_t bytes, int repetitions, const Memory& from, const Memory& to,
                           const std::function<void()>& enqueue) {
  const auto copy = [&] { must(cudaMemcpyAsync(to.get(), from.get(), bytes / 2, cudaMemcpyDeviceToDevice, nullptr)); };
  milliseconds(copy);
  milliseconds(enqueue);
  std::vector<double> percents, times;
  for (int i = 0; i < repetitions; ++i) {
    const double copied = milliseconds(copy), own = milliseconds(enqueue);
    percents.push_back(100 * copied / own);
    times.push_back(own);
  }
  std::sort(percents.begin(), percents.end());
  std::sort(times.begin(), times.end());
  return {static_cast<double>(bytes) * 1e-6 / times[times.size() / 2], percents.front(), percents[percents.size() / 2],
          percents.back()};
}

inline std::vector<std::byte> onHost(const Memory& memory, size_t bytes) {
  std::vector<std::byte> host(bytes);
  must(cudaMemcpy(host.data(), memory.get(), bytes, cudaMemcpyDefault));
  return host;
}

}  // namespace lowcomm
