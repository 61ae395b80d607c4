#pragma once

#include <cstdint>
#include <functional>

namespace lowcomm::sim {

// One block of CUDA threads on one thread of the host: a fiber each. A fiber runs until it waits for others; then the
// next one of its warp goes on, and other warps only once this one cannot.
//
// Returns when all have returned from `body`; throws std::logic_error when none can go on, as where only some threads
// of a warp reach a shuffle, or of a block a barrier. `threads` is a multiple of 32, `enter(t)` is called whenever
// thread t goes on. `backwards` takes the threads in descending order: what depends on the order of threads, as with a
// forgotten barrier, differs from one order to the other.
void runBlock(unsigned threads, bool backwards, const std::function<void(unsigned)>& enter,
              const std::function<void()>& body);

// Only within runBlock. Waits for every thread of the block.
void syncBlock();

// Waits for all 32 threads of the warp; gives each the value that thread `source` (in the warp) brought.
uint64_t exchangeInWarp(uint64_t value, unsigned source);

// The same of one bit, and each gets those of all: thread t's in bit t.
uint32_t ballotInWarp(bool mine);

// Of the thread that is running.
unsigned laneInWarp();

}  // namespace lowcomm::sim
