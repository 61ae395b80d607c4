#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "codec/payload.h"

namespace lowcomm::cuda {

// The parts of a caller's workspace, one after another, each aligned as the whole (16 bytes); of none, their bytes.
class Workspace {
 public:
  explicit Workspace(void* at) : at_(static_cast<std::byte*>(at)) {}

  template <class T>
  T* take(uint64_t count) {
    T* part = at_ == nullptr ? nullptr : reinterpret_cast<T*>(at_ + bytes_);
    bytes_ += up64(count * sizeof(T));
    return part;
  }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* at_;
  size_t bytes_ = 0;
};

// Throws ValueError.
inline void expectAligned(const char* doing, const char* what, const void* at) {
  if (const auto over = reinterpret_cast<uintptr_t>(at) % 16; over != 0) {
    throw ValueError(std::string(doing) + ": " + what + ": expected an address that is a multiple of 16, got " +
                     std::to_string(over) + " more");
  }
}

}  // namespace lowcomm::cuda
