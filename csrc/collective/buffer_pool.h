#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

namespace lowcomm {

// Frame buffers of one group, reused: fresh memory would cost a page fault every 4 KiB. Thread-safe. A buffer goes back
// when its handle is dropped; trimAfter() frees it then, but one that went back by an exception is never freed before
// the pool, so a transfer that outlives a failed op writes into memory that is still there. Nobody else drops a handle
// whose transfer is under way.
class BufferPool {
 public:
  // `capacity`: bytes that any frame of the group fits in.
  explicit BufferPool(size_t capacity) : capacity_(capacity) {}
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  struct Return {
    BufferPool* pool = nullptr;
    size_t bytes = 0;
    void operator()(std::byte* buffer) const { pool->give(buffer, bytes); }
  };
  using Buffer = std::unique_ptr<std::byte[], Return>;

  size_t capacity() const { return capacity_; }

  // A buffer of capacity() bytes, or of `bytes` or a little more: sizes are rounded up to whole pages and a quarter of
  // a power of two, so that few sizes are kept apart.
  Buffer take() { return take(capacity_); }
  Buffer take(size_t bytes);
  static std::span<std::byte> span(const Buffer& buffer) { return {buffer.get(), buffer.get_deleter().bytes}; }

  // Bytes of all buffers, those taken and those that lie idle.
  size_t held();

  // Frees what lies idle beyond kKeptBytes, after a message that took more than that: one between two ranks takes as
  // many buffers as it has frames.
  void trimAfter(size_t bytes);
  static constexpr size_t kKeptBytes = 8 << 20;

 private:
  // Of one size.
  struct Idle {
    std::vector<std::byte*> buffers, risky;  // risky: went back by an exception
  };
  void give(std::byte* buffer, size_t bytes);

  const size_t capacity_;
  std::mutex mutex_;
  std::unordered_map<std::byte*, size_t> all_;  // with their sizes
  std::map<size_t, Idle> idle_;                 // by size
};

}  // namespace lowcomm
