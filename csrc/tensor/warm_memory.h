#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace lowcomm {

// Host memory for results that a caller gives no memory for. The C library returns a block of some MiB to the system
// when it is freed, and the next one is paged in anew, 4 KiB at a time: several times slower than decoding into it. So
// freed blocks are kept here for the next result. Thread-safe, and so after a fork.
class WarmMemory : public c10::Allocator {
 public:
  static constexpr size_t kLeast = size_t{1} << 20;   // bytes of a block that is kept: smaller ones the C library keeps
  static constexpr size_t kMost = size_t{256} << 20;  // bytes that are kept altogether; the oldest go first

  // A kept block of at most twice the size, or a new one; c10::Error where there is no memory.
  c10::DataPtr allocate(size_t bytes) override;
  void copy_data(void* to, const void* from, size_t bytes) const override;

  // Bytes that are kept now.
  size_t kept() const;
};

// The process's; never destroyed, for tensors may outlive everything.
WarmMemory& warmMemory();

}  // namespace lowcomm
