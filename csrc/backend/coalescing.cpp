#include "backend/coalescing.h"

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

namespace lowcomm {

struct Coalescing::Block {
  struct MessageEntry {
    c10::intrusive_ptr<GroupWork> work;
    Message message;
  };
  struct Collective {
    c10::intrusive_ptr<GroupWork> work;
    uint64_t sequence;
    std::function<void(std::exception_ptr)> cancel;
  };
  c10::intrusive_ptr<GroupWork> group;
  std::vector<Collective> collectives;
  std::vector<MessageEntry> messages;
  std::exception_ptr error = {};  // the first in it
  bool kept = false;              // whether a wait has left it to the block's end
  uint64_t started = 0;           // the last number of what was started, in the block or before it
};

Coalescing::Coalescing(Group& group, InnerBackend& inner) : group_(group), inner_(inner) {}

Coalescing::~Coalescing() = default;

// Whether a wait inside the open `block` leaves the error to the block's end: the first one that meets an error does.
// A block that an exception in its body has left open looks like an open one, and has no end. So the second wait that
// meets an error throws, and the block is left: no mistake may mute the ops that come after it. Where the group is over
// every wait throws.
bool Coalescing::keepsError(const std::weak_ptr<Block>& block, const std::exception_ptr& error) {
  const bool lives = group_.lives();
  if (!block_ || block.lock() != block_ || !lives) return false;
  if (!block_->error) block_->error = error;
  if (block_->kept) {
    leave("the op was put off to the end of a coalescing block, in which an op failed that was waited for");
    return false;
  }
  block_->kept = true;
  TORCH_WARN(
      "lowcomm: group ", group_.name(),
      ": an op failed that was waited for inside a coalescing block; the block's end raises its error, or the next op "
      "that is waited for");
  return true;
}

c10::intrusive_ptr<GroupWork> Coalescing::standIn(c10d::OpType op, std::function<WorkPtr()> start) {
  auto work = c10::make_intrusive<GroupWork>(group_.rank, op);
  work->standFor(std::move(start), [this, living = group_.living("a coalescing block"),
                                    block = std::weak_ptr<Block>(block_)](std::exception_ptr error) {
    if (block.expired()) return false;
    const BackendPtr held = living();
    return keepsError(block, error);
  });
  return work;
}

WorkPtr Coalescing::putOffMessage(c10d::OpType op, Message message, std::function<WorkPtr()> issue) {
  if (!block_) return issue();
  block_->messages.push_back({standIn(op, std::move(issue)), std::move(message)});
  return block_->messages.back().work;
}

WorkPtr Coalescing::putOff(c10d::OpType op, uint64_t sequence, std::function<WorkPtr()> start,
                           std::function<void(std::exception_ptr)> cancel) {
  // Every rank starts a block's collectives in the order of their calls, whichever it waits for first.
  const auto inOrder = [block = std::weak_ptr<Block>(block_), sequence, last = group_.sequence.load(),
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

void Coalescing::startPutOff() {
  if (block_ && !block_->collectives.empty()) block_->collectives.back().work->start();
}

uint64_t Coalescing::takeNumbers(uint64_t count) {
  startPutOff();
  group_.sequence += count;
  if (block_) block_->started = group_.sequence;
  return group_.sequence - count + 1;
}

WorkPtr Coalescing::run(c10d::OpType op, const std::function<WorkPtr()>& issue) {
  if (!block_) return issue();
  if (!block_->error) {
    try {
      return issue();
    } catch (...) {
      block_->error = std::current_exception();
    }
  }
  return putOffMessage(op, {}, [error = block_->error]() -> WorkPtr { std::rethrow_exception(error); });
}

void Coalescing::leave(const std::string& why) {
  const auto block = std::exchange(block_, {});
  if (block) cancelAll(*block, std::make_exception_ptr(std::runtime_error("lowcomm: " + why)));
}

void Coalescing::begin() {
  if (block_) {
    // torch ends a block only when its body did not raise.
    const auto waits = [](const auto& op) { return !op.work->issued(); };
    const auto left = std::count_if(block_->messages.begin(), block_->messages.end(), waits) +
                      std::count_if(block_->collectives.begin(), block_->collectives.end(), waits);
    TORCH_WARN("lowcomm: group ", group_.name(),
               ": a coalescing block was not ended: its body raised, or another block began inside it; ", left,
               " ops of it were not started");
    leave(
        "the op was put off to the end of a coalescing block that was not ended: its body raised, or another block "
        "began "
        "inside it");
  }
  block_ = std::make_shared<Block>();
  block_->group = c10::make_intrusive<GroupWork>(group_.rank, c10d::OpType::COALESCED);
  block_->started = group_.sequence;
}

WorkPtr Coalescing::end() {
  TORCH_CHECK(block_, "lowcomm: expected an open coalescing block when one ends");
  const auto block = std::exchange(block_, {});
  std::exception_ptr error = block->error;
  try {
    if (error) std::rethrow_exception(error);
    for (const Block::MessageEntry& p : block->messages) {
      if (p.message.prepare && !p.work->issued()) p.message.prepare();
    }
    startAll(*block);
  } catch (...) {
    error = std::current_exception();
    cancelAll(*block, error);
  }
  block->group->issue();
  if (error) std::rethrow_exception(error);
  return block->group;
}

// Ends what was not started, and gives its numbers back: they are the last there are.
void Coalescing::cancelAll(Block& block, const std::exception_ptr& error) {
  for (const Block::Collective& collective : block.collectives) {
    if (collective.work->issued()) continue;
    if (collective.cancel) collective.cancel(error);
    collective.work->fail(error);
  }
  group_.sequence = block.started;
  for (const Block::MessageEntry& p : block.messages)
    p.work->fail(error);
  block.group->issue();
}

void Coalescing::startAll(Block& block) {
  for (const Block::Collective& collective : block.collectives)
    block.group->add(collective.work->start());
  // NCCL starts grouped ops together, so their order does not matter to it.
  const bool devices = std::any_of(block.messages.begin(), block.messages.end(),
                                   [](const Block::MessageEntry& p) { return p.message.device; });
  const BackendPtr grouped = devices ? inner_.get() : nullptr;
  if (grouped) grouped->startCoalescing();
  std::exception_ptr error;
  try {
    for (bool receives : {true, false}) {
      for (const Block::MessageEntry& p : block.messages) {
        if (p.message.receive != receives) continue;
        WorkPtr work = p.work->start();
        if (!(grouped && p.message.device)) block.group->add(work);
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
