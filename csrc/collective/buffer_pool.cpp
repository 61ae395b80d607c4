#include "collective/buffer_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <new>

namespace lowcomm {
namespace {

// Pages of their own, which go back to the system wherever they lie; a heap keeps what lies under something in use.
std::byte* newPages(size_t bytes) {
  void* pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(pages);
}

}  // namespace

BufferPool::~BufferPool() {
  for (const auto& [buffer, bytes] : all_)
    ::munmap(buffer, bytes);
}

BufferPool::Buffer BufferPool::take(size_t bytes) {
  constexpr size_t kPage = 4096;
  const size_t granule = std::max(kPage, std::bit_floor(bytes) / 4);
  if (bytes != capacity_) bytes = (bytes + granule - 1) / granule * granule;
  std::lock_guard<std::mutex> lock(mutex_);
  Idle& idle = idle_[bytes];
  std::vector<std::byte*>& from = idle.buffers.empty() ? idle.risky : idle.buffers;
  if (from.empty()) {
    std::byte* fresh = newPages(bytes);
    all_.emplace(fresh, bytes);
    return Buffer(fresh, Return{this, bytes});
  }
  std::byte* buffer = from.back();
  from.pop_back();
  return Buffer(buffer, Return{this, bytes});
}

size_t BufferPool::held() {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t held = 0;
  for (const auto& [buffer, bytes] : all_)
    held += bytes;
  return held;
}

void BufferPool::give(std::byte* buffer, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Idle& idle = idle_[bytes];
  (std::uncaught_exceptions() > 0 ? idle.risky : idle.buffers).push_back(buffer);
}

void BufferPool::trimAfter(size_t bytes) {
  if (bytes <= kKeptBytes) return;
  std::lock_guard<std::mutex> lock(mutex_);
  size_t kept = 0;
  for (auto& [size, idle] : idle_) {
    for (; !idle.buffers.empty() && kept + idle.buffers.size() * size > kKeptBytes; idle.buffers.pop_back()) {
      all_.erase(idle.buffers.back());
      ::munmap(idle.buffers.back(), size);
    }
    kept += idle.buffers.size() * size;
  }
}

}  // namespace lowcomm
