// Coalescing: inside a block point-to-point ops are put off. At its end what sends need from a device is set under way,
// then receives are posted before sends (a rank that sends first runs the exchange half-duplex). One implementation
// serves both devices.
#include "backend/backend.h"

namespace lowcomm {

WorkPtr LowcommBackend::postpone(c10d::OpType op, Pending pending, std::function<WorkPtr()> issue) {
  if (!coalesced_) return issue();
  pending.work = c10::make_intrusive<GroupWork>(rank_, op);
  pending.work->standFor(std::move(issue));
  pending_.push_back(pending);
  return pending.work;
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
  }
  coalesced_ = c10::make_intrusive<GroupWork>(rank_, c10d::OpType::COALESCED);
}

WorkPtr LowcommBackend::endCoalescing() {
  TORCH_CHECK(coalesced_, "lowcomm: expected an open coalescing block when one ends");
  auto group = std::move(coalesced_);
  auto pending = std::move(pending_);
  coalesced_.reset();
  pending_.clear();
  for (Pending& p : pending) {
    if (p.prepare && !p.work->issued()) p.prepare();
  }
  // NCCL starts grouped ops together, so their order does not matter to it.
  const bool devices = std::any_of(pending.begin(), pending.end(), [](const Pending& p) { return p.device; });
  const BackendPtr grouped = devices ? forDevices() : nullptr;
  if (grouped) grouped->startCoalescing();
  for (bool receives : {true, false}) {
    for (Pending& p : pending) {
      if (p.receive != receives) continue;
      WorkPtr work = p.work->start();
      if (!(grouped && p.device)) group->add(work);
    }
  }
  if (grouped) {
    if (WorkPtr work = grouped->endCoalescing()) group->add(work);
  }
  group->issue();
  return group;
}

}  // namespace lowcomm
