// Coalescing: inside a block point-to-point ops are put off. At its end what sends need from a device is set under way,
// then receives are posted before sends (a rank that sends first runs the exchange half-duplex). One implementation
// serves both devices.
//
// torch keeps its own list of a block whose body raises for ever, and every later op of the group only joins that list:
// nothing may be raised inside a block. The first mistake is kept, what follows it is not begun, and the block's end
// throws it, with no point-to-point op started.
#include <algorithm>
#include <utility>

#include "backend/backend.h"

namespace lowcomm {

WorkPtr LowcommBackend::postpone(c10d::OpType op, Pending pending, std::function<WorkPtr()> issue) {
  if (!coalesced_) return issue();
  pending.work = c10::make_intrusive<GroupWork>(rank_, op);
  pending.work->standFor(std::move(issue));
  pending_.push_back(pending);
  return pending.work;
}

WorkPtr LowcommBackend::inBlock(c10d::OpType op, const std::function<WorkPtr()>& issue) {
  if (!coalesced_) return issue();
  if (!mistake_) {
    try {
      return issue();
    } catch (...) {
      mistake_ = std::current_exception();
    }
  }
  return postpone(op, {}, [error = mistake_]() -> WorkPtr { std::rethrow_exception(error); });
}

void LowcommBackend::startCoalescing() {
  if (coalesced_) {
    // torch ends a block only when its body did not raise. What that body put off was never started.
    const auto left =
        std::count_if(pending_.begin(), pending_.end(), [](const Pending& p) { return !p.work->issued(); });
    TORCH_WARN("lowcomm: group ", groupName(),
               ": a coalescing block was left open, by an exception in its body: ", left,
               " point-to-point ops of it were not started");
    coalesced_->issue();
    pending_.clear();
    mistake_ = nullptr;
  }
  coalesced_ = c10::make_intrusive<GroupWork>(rank_, c10d::OpType::COALESCED);
}

WorkPtr LowcommBackend::endCoalescing() {
  TORCH_CHECK(coalesced_, "lowcomm: expected an open coalescing block when one ends");
  const auto group = std::exchange(coalesced_, {});
  const auto pending = std::exchange(pending_, {});
  std::exception_ptr error = std::exchange(mistake_, nullptr);
  try {
    if (error) std::rethrow_exception(error);
    for (const Pending& p : pending) {
      if (p.prepare && !p.work->issued()) p.prepare();
    }
    startPending(*group, pending);
  } catch (...) {
    error = std::current_exception();
    for (const Pending& p : pending)
      p.work->fail(error);
  }
  group->issue();
  if (error) std::rethrow_exception(error);
  return group;
}

void LowcommBackend::startPending(GroupWork& group, const std::vector<Pending>& pending) {
  // NCCL starts grouped ops together, so their order does not matter to it.
  const bool devices = std::any_of(pending.begin(), pending.end(), [](const Pending& p) { return p.device; });
  const BackendPtr grouped = devices ? forDevices() : nullptr;
  if (grouped) grouped->startCoalescing();
  std::exception_ptr error;
  try {
    for (bool receives : {true, false}) {
      for (const Pending& p : pending) {
        if (p.receive != receives) continue;
        WorkPtr work = p.work->start();
        if (!(grouped && p.device)) group.add(work);
      }
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (grouped) {
    if (WorkPtr work = grouped->endCoalescing()) group.add(work);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace lowcomm
