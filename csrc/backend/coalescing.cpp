// Coalescing: inside a block ops are checked and put off. At its end collectives start in the order of their calls;
// then what sends need from a device is set under way, and receives are posted before sends (a rank that sends first
// runs the exchange half-duplex). One implementation serves both devices.
//
// torch keeps its own list of a block whose body raises for ever, and every later op of the group only joins that list:
// the first error is not raised inside a block but kept, what follows it is not begun, and the block's end throws it,
// with nothing started but what somebody waited for inside the block. (What the inner backend alone finds
// wrong, it finds at the start: what came before has started then.)
#include <algorithm>
#include <utility>

#include "backend/backend.h"

namespace lowcomm {

struct LowcommBackend::Block {
  struct Collective {
    c10::intrusive_ptr<GroupWork> work;
    uint64_t sequence;
    std::function<void(std::exception_ptr)> cancel;
  };
  c10::intrusive_ptr<GroupWork> group;
  std::vector<Collective> collectives;
  std::vector<Pending> messages;
  std::exception_ptr error = {};  // the first in it
  bool kept = false;              // whether a wait has left it to the block's end
  uint64_t started = 0;           // the last number of what was started, in the block or before it
};

std::function<c10::intrusive_ptr<LowcommBackend>()> LowcommBackend::living(const char* op) {
  auto weak = c10::weak_intrusive_ptr<LowcommBackend>(c10::intrusive_ptr<LowcommBackend>::reclaim_copy(this));
  return [weak, op] {
    auto backend = weak.lock();
    TORCH_CHECK_WITH(DistBackendError, backend, "lowcomm: ", op, ": expected a living group, got one that is gone");
    return backend;
  };
}

// Whether a wait inside the open `block` leaves the error to the block's end: the first one that meets an error does.
// A block that an exception in its body has left open looks like an open one, and has no end. So the second wait that
// meets an error throws, and the block is left: no mistake may mute the ops that come after it. Where the group is over
// every wait throws.
bool LowcommBackend::keepsError(const std::weak_ptr<Block>& block, const std::exception_ptr& error) {
  Engine* engine = running();
  const bool lives = engine && !stopped_ && engine->endedWhy().empty();
  if (!block_ || block.lock() != block_ || !lives) return false;
  if (!block_->error) block_->error = error;
  if (block_->kept) {
    leaveBlock("the op was put off to the end of a coalescing block, in which an op failed that was waited for");
    return false;
  }
  block_->kept = true;
  TORCH_WARN(
      "lowcomm: group ", groupName(),
      ": an op failed that was waited for inside a coalescing block; the block's end raises its error, or the next op "
      "that is waited for");
  return true;
}

c10::intrusive_ptr<GroupWork> LowcommBackend::standIn(c10d::OpType op, std::function<WorkPtr()> start) {
  auto work = c10::make_intrusive<GroupWork>(rank_, op);
  work->standFor(std::move(start),
                 [backend = living("a coalescing block"), block = std::weak_ptr<Block>(block_)](
                     std::exception_ptr error) { return !block.expired() && backend()->keepsError(block, error); });
  return work;
}

WorkPtr LowcommBackend::postpone(c10d::OpType op, Pending pending, std::function<WorkPtr()> issue) {
  if (!block_) return issue();
  pending.work = standIn(op, std::move(issue));
  block_->messages.push_back(pending);
  return pending.work;
}

WorkPtr LowcommBackend::putOff(c10d::OpType op, uint64_t sequence, std::function<WorkPtr()> start,
                               std::function<void(std::exception_ptr)> cancel) {
  // Every rank starts a block's collectives in the order of their calls, whichever it waits for first.
  const auto inOrder = [block = std::weak_ptr<Block>(block_), sequence, last = sequence_.load(),
                        start = std::move(start), cancel]() -> WorkPtr {
    const auto open = block.lock();
    try {
      for (size_t i = 0; open && i < open->collectives.size() && open->collectives[i].sequence < sequence; ++i)
        open->collectives[i].work->start();
      WorkPtr work = start();
      if (open) open->started = last;
      return work;
    } catch (...) {
      if (cancel) cancel(std::current_exception());  // or what it borrowed would stay borrowed
      throw;
    }
  };
  block_->collectives.push_back({standIn(op, inOrder), sequence, std::move(cancel)});
  return block_->collectives.back().work;
}

void LowcommBackend::startPutOff() {
  if (block_ && !block_->collectives.empty()) block_->collectives.back().work->start();
}

uint64_t LowcommBackend::takeNumbers(uint64_t count) {
  startPutOff();
  sequence_ += count;
  if (block_) block_->started = sequence_;
  return sequence_ - count + 1;
}

WorkPtr LowcommBackend::inBlock(c10d::OpType op, const std::function<WorkPtr()>& issue) {
  if (!block_) return issue();
  if (!block_->error) {
    try {
      return issue();
    } catch (...) {
      block_->error = std::current_exception();
    }
  }
  return postpone(op, {}, [error = block_->error]() -> WorkPtr { std::rethrow_exception(error); });
}

void LowcommBackend::leaveBlock(const std::string& why) {
  const auto block = std::exchange(block_, {});
  if (block) cancelBlock(*block, std::make_exception_ptr(std::runtime_error("lowcomm: " + why)));
}

void LowcommBackend::startCoalescing() {
  if (block_) {
    // torch ends a block only when its body did not raise.
    const auto waits = [](const auto& op) { return !op.work->issued(); };
    const auto left = std::count_if(block_->messages.begin(), block_->messages.end(), waits) +
                      std::count_if(block_->collectives.begin(), block_->collectives.end(), waits);
    TORCH_WARN("lowcomm: group ", groupName(),
               ": a coalescing block was not ended: its body raised, or another block began inside it; ", left,
               " ops of it were not started");
    leaveBlock(
        "the op was put off to the end of a coalescing block that was not ended: its body raised, or another block "
        "began "
        "inside it");
  }
  block_ = std::make_shared<Block>();
  block_->group = c10::make_intrusive<GroupWork>(rank_, c10d::OpType::COALESCED);
  block_->started = sequence_;
}

WorkPtr LowcommBackend::endCoalescing() {
  TORCH_CHECK(block_, "lowcomm: expected an open coalescing block when one ends");
  const auto block = std::exchange(block_, {});
  std::exception_ptr error = block->error;
  try {
    if (error) std::rethrow_exception(error);
    for (const Pending& p : block->messages) {
      if (p.prepare && !p.work->issued()) p.prepare();
    }
    startBlock(*block);
  } catch (...) {
    error = std::current_exception();
    cancelBlock(*block, error);
  }
  block->group->issue();
  if (error) std::rethrow_exception(error);
  return block->group;
}

// Ends what was not started, and gives its numbers back: they are the last there are.
void LowcommBackend::cancelBlock(Block& block, const std::exception_ptr& error) {
  for (const Block::Collective& collective : block.collectives) {
    if (collective.work->issued()) continue;
    if (collective.cancel) collective.cancel(error);
    collective.work->fail(error);
  }
  sequence_ = block.started;
  for (const Pending& p : block.messages)
    p.work->fail(error);
  block.group->issue();
}

void LowcommBackend::startBlock(Block& block) {
  for (const Block::Collective& collective : block.collectives)
    block.group->add(collective.work->start());
  // NCCL starts grouped ops together, so their order does not matter to it.
  const bool devices =
      std::any_of(block.messages.begin(), block.messages.end(), [](const Pending& p) { return p.device; });
  const BackendPtr grouped = devices ? forDevices() : nullptr;
  if (grouped) grouped->startCoalescing();
  std::exception_ptr error;
  try {
    for (bool receives : {true, false}) {
      for (const Pending& p : block.messages) {
        if (p.receive != receives) continue;
        WorkPtr work = p.work->start();
        if (!(grouped && p.device)) block.group->add(work);
      }
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (grouped) {
    if (WorkPtr work = grouped->endCoalescing()) block.group->add(work);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace lowcomm
