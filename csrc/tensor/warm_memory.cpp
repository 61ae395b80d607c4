#include "tensor/warm_memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <pthread.h>

#include <cstring>
#include <deque>
#include <mutex>

namespace lowcomm {
namespace {

struct Block {
  void* data;
  size_t bytes;
};

// Unused blocks, the oldest first.
struct FreeBlocks {
  std::mutex mutex;
  std::deque<Block> blocks;
  size_t bytes = 0;
};

FreeBlocks& kept() {
  static FreeBlocks& made = []() -> FreeBlocks& {
    // A fork copies the mutex in its state: it must be unlocked then.
    pthread_atfork([] { kept().mutex.lock(); }, [] { kept().mutex.unlock(); }, [] { kept().mutex.unlock(); });
    return *new FreeBlocks;
  }();
  return made;
}

Block take(size_t bytes) {
  FreeBlocks& all = kept();
  std::lock_guard lock(all.mutex);
  auto best = all.blocks.end();
  for (auto block = all.blocks.begin(); block != all.blocks.end(); ++block) {
    const bool fits = block->bytes >= bytes && block->bytes / 2 <= bytes;
    if (fits && (best == all.blocks.end() || block->bytes < best->bytes)) best = block;
  }
  if (best == all.blocks.end()) return {nullptr, bytes};
  const Block found = *best;
  all.blocks.erase(best);
  all.bytes -= found.bytes;
  return found;
}

// Keeps a block; frees it, or older ones, where that is too much. What is freed is freed outside of the lock.
void give(Block block) {
  std::deque<Block> freed;
  {
    FreeBlocks& all = kept();
    std::lock_guard lock(all.mutex);
    all.blocks.push_back(block);
    all.bytes += block.bytes;
    while (all.bytes > WarmMemory::kMost) {
      freed.push_back(all.blocks.front());
      all.blocks.pop_front();
      all.bytes -= freed.back().bytes;
    }
  }
  for (const Block& old : freed)
    c10::free_cpu(old.data);
}

void release(void* context) {
  Block* block = static_cast<Block*>(context);
  give(*block);
  delete block;
}

}  // namespace

c10::DataPtr WarmMemory::allocate(size_t bytes) {
  if (bytes < kLeast || bytes > kMost) return c10::GetCPUAllocator()->allocate(bytes);
  Block block = take(bytes);
  if (!block.data) block.data = c10::alloc_cpu(bytes);
  return {block.data, new Block(block), &release, c10::DeviceType::CPU};
}

void WarmMemory::copy_data(void* to, const void* from, size_t bytes) const {
  std::memcpy(to, from, bytes);
}

size_t WarmMemory::kept() const {
  FreeBlocks& all = lowcomm::kept();
  std::lock_guard lock(all.mutex);
  return all.bytes;
}

WarmMemory& warmMemory() {
  static WarmMemory& made = *new WarmMemory;
  return made;
}

}  // namespace lowcomm
