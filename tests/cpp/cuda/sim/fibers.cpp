#include "fibers.h"

#include <ucontext.h>

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace lowcomm::sim {
namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 128 * 1024;

// AddressSanitizer follows a stack and must be told of every change: where to, and, once there, from where.
struct Stack {
  ucontext_t context{};
  const void* bottom = nullptr;
  size_t size = 0;
  void* shadow = nullptr;  // AddressSanitizer's, while the fiber is away
};

void arrive(Stack& here, Stack* from) {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom;
  size_t size;
  __sanitizer_finish_switch_fiber(here.shadow, &bottom, &size);
  if (from != nullptr && from->bottom == nullptr) {  // the host thread's own stack, seen for the first time
    from->bottom = bottom;
    from->size = size;
  }
#else
  static_cast<void>(here), static_cast<void>(from);
#endif
}

void change(Stack& from, Stack& to, bool for_good = false) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &from.shadow, to.bottom, to.size);
#endif
  static_cast<void>(for_good);
  swapcontext(&from.context, &to.context);
  arrive(from, nullptr);
}

struct Barrier {
  unsigned expected = 0, arrived = 0, generation = 0;
};

struct Thread {
  Stack stack;
  bool done = false;
  unsigned exchanges = 0;
};

class Block {
  using Slots = std::vector<uint64_t>;

 public:
  Block(unsigned threads, const std::function<void(unsigned)>& enter, const std::function<void()>& body)
      : enter_(enter), body_(body), threads_(threads), warps_(threads / kWarp), slots_{Slots(threads), Slots(threads)} {
    all_.expected = threads;
    for (Barrier& warp : warps_)
      warp.expected = kWarp;
    // One piece, kept for the next block of as many threads: a launch has many.
    static std::vector<std::unique_ptr<std::byte[]>> stacks;
    while (stacks.size() < threads)
      stacks.push_back(std::make_unique_for_overwrite<std::byte[]>(kStackBytes));
    for (unsigned t = 0; t < threads; ++t) {
      Stack& stack = threads_[t].stack;
      stack.bottom = stacks[t].get();
      stack.size = kStackBytes;
      getcontext(&stack.context);
      stack.context.uc_stack.ss_sp = stacks[t].get();
      stack.context.uc_stack.ss_size = kStackBytes;
      stack.context.uc_link = nullptr;
#if defined(__SANITIZE_ADDRESS__)
      __asan_unpoison_memory_region(stacks[t].get(), kStackBytes);  // of the fiber that had it before
#endif
      makecontext(&stack.context, &Block::start, 0);
    }
  }

  // A warp runs as far as it can before the next one starts: the schedule that shows best where a barrier is missing.
  void run(bool backwards) {
    const unsigned threads = static_cast<unsigned>(threads_.size());
    left_ = threads;
    while (left_ > 0) {
      bool moved = false;
      for (unsigned w = 0; w < threads / kWarp; ++w) {
        const unsigned warp = backwards ? threads / kWarp - 1 - w : w;
        while (runWarp(warp * kWarp, backwards))
          moved = true;
      }
      if (!moved && left_ > 0) {
        throw std::logic_error(
            "simulated CUDA block: expected every thread to reach the barrier or shuffle that some wait at, got " +
            std::to_string(left_) + " threads that wait for ever");
      }
    }
  }

  void sync(Barrier& barrier) {
    moved_ = true;
    const unsigned generation = barrier.generation;
    if (++barrier.arrived == barrier.expected) {
      barrier.arrived = 0;
      ++barrier.generation;
      return;
    }
    while (barrier.generation == generation)
      change(threads_[current_].stack, host_);
  }

  void syncAll() { sync(all_); }

  uint64_t exchange(uint64_t value, unsigned source) { return all(value)[source % kWarp]; }

  uint32_t ballot(bool mine) {
    const uint64_t* bits = all(mine);
    uint32_t ballot = 0;
    for (unsigned t = 0; t < kWarp; ++t)
      ballot |= static_cast<uint32_t>(bits[t]) << t;
    return ballot;
  }

  unsigned current() const { return current_; }

  static inline Block* running = nullptr;

 private:
  // Lets each of its threads go on once; false when none got anywhere.
  bool runWarp(unsigned first, bool backwards) {
    moved_ = false;
    for (unsigned i = 0; i < kWarp; ++i) {
      current_ = first + (backwards ? kWarp - 1 - i : i);
      if (threads_[current_].done) continue;
      enter_(current_);
      change(host_, threads_[current_].stack);
      if (threads_[current_].done) {
        --left_;
        moved_ = true;
      }
    }
    return moved_;
  }

  // The values that the threads of the warp bring, once all have. Two sets of slots by turns: nobody is in the exchange
  // after next before everybody has read this one's.
  const uint64_t* all(uint64_t value) {
    const unsigned me = current_, warp = me / kWarp;
    Slots& slots = slots_[threads_[me].exchanges++ % 2];
    slots[me] = value;
    sync(warps_[warp]);
    return slots.data() + warp * kWarp;
  }

  static void start() {
    Block& block = *running;
    Thread& self = block.threads_[block.current_];
    arrive(self.stack, &block.host_);
    block.body_();
    self.done = true;
    change(self.stack, block.host_, /*for_good=*/true);
  }

  const std::function<void(unsigned)>& enter_;
  const std::function<void()>& body_;
  std::vector<Thread> threads_;
  std::vector<Barrier> warps_;
  Slots slots_[2];
  Barrier all_;
  Stack host_;
  unsigned current_ = 0, left_ = 0;
  bool moved_ = false;
};

}  // namespace

void runBlock(unsigned threads, bool backwards, const std::function<void(unsigned)>& enter,
              const std::function<void()>& body) {
  if (threads == 0 || threads % kWarp != 0) {
    throw std::logic_error("simulated CUDA block: expected whole warps, got " + std::to_string(threads) + " threads");
  }
  Block block(threads, enter, body);
  struct RunningBlock {
    explicit RunningBlock(Block* now) { Block::running = now; }
    ~RunningBlock() { Block::running = nullptr; }
  } running(&block);
  block.run(backwards);
}

void syncBlock() {
  Block::running->syncAll();
}

uint64_t exchangeInWarp(uint64_t value, unsigned source) {
  return Block::running->exchange(value, source);
}

uint32_t ballotInWarp(bool mine) {
  return Block::running->ballot(mine);
}

unsigned laneInWarp() {
  return Block::running->current() % kWarp;
}

}  // namespace lowcomm::sim
