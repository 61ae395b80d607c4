#pragma once

#include <stdexcept>
#include <string>

struct CUstream_st;  // what a cudaStream_t points to: callers need no CUDA header

namespace lowcomm::cuda {

// Where a call runs: it enqueues on `stream` (null: the default stream) of device `device`, makes that device the
// calling thread's for its own duration, and returns without waiting.
struct Place {
  int device = 0;
  CUstream_st* stream = nullptr;
};

// The CUDA runtime refused a call. `code` is its cudaError_t; the message has its name and text.
struct CudaError : std::runtime_error {
  CudaError(const std::string& what, int code) : std::runtime_error(what), code(code) {}
  int code;
};

// Devices that this process can use; 0 without a driver. Does not throw.
int deviceCount();

}  // namespace lowcomm::cuda
