// Point to point, and coalescing: inside a block point-to-point ops are put off, and at its end receives are posted
// before sends (a rank that sends first runs the exchange half-duplex). One implementation serves both devices.
#include "backend/backend.h"
#include "backend/errors.h"
#include "backend/python_state.h"

namespace lowcomm {

WorkPtr LowcommBackend::pointToPoint(c10d::OpType op, const char* name, Tensors tensors, bool receive, int peer,
                                     std::function<WorkPtr(c10d::Backend&)> call) {
  const bool device = !tensors.empty() && !tensors[0].device().is_cpu();
  // The op may be started by its Work, which may outlive the group.
  auto weak = c10::weak_intrusive_ptr<LowcommBackend>(c10::intrusive_ptr<LowcommBackend>::reclaim_copy(this));
  auto issue = [weak, op, name, tensors = std::move(tensors), receive, peer, call = std::move(call)] {
    auto backend = weak.lock();
    TORCH_CHECK_WITH(DistBackendError, backend, "lowcomm: ", name, ": expected a living group, got one that is gone");
    return backend->viaInner(op, name, tensors, receive ? tensors : Tensors{}, call, /*collective=*/false, {},
                             ", peer rank " + (peer < 0 ? std::string("any") : std::to_string(peer)));
  };
  if (!coalesced_) return issue();
  auto stand_in = c10::make_intrusive<GroupWork>(rank_, op);
  stand_in->standFor(std::move(issue));
  pending_.push_back({stand_in, receive, device});
  return stand_in;
}

WorkPtr LowcommBackend::send(Tensors& tensors, int to, int tag) {
  return pointToPoint(c10d::OpType::SEND, "send", tensors, false, to,
                      [tensors, to, tag](c10d::Backend& inner) mutable { return inner.send(tensors, to, tag); });
}

WorkPtr LowcommBackend::recv(Tensors& tensors, int from, int tag) {
  return pointToPoint(c10d::OpType::RECV, "recv", tensors, true, from,
                      [tensors, from, tag](c10d::Backend& inner) mutable { return inner.recv(tensors, from, tag); });
}

WorkPtr LowcommBackend::recvAnysource(Tensors& tensors, int tag) {
  return pointToPoint(c10d::OpType::RECVANYSOURCE, "recv", tensors, true, -1,
                      [tensors, tag](c10d::Backend& inner) mutable { return inner.recvAnysource(tensors, tag); });
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
  // NCCL starts grouped ops together, so their order does not matter to it.
  const bool grouped =
      device_ && std::any_of(pending.begin(), pending.end(), [](const Pending& p) { return p.device; });
  if (grouped) device_->startCoalescing();
  for (bool receives : {true, false}) {
    for (Pending& p : pending) {
      if (p.receive != receives) continue;
      WorkPtr work = p.work->start();
      if (!(grouped && p.device)) group->add(work);
    }
  }
  if (grouped) {
    if (WorkPtr work = device_->endCoalescing()) group->add(work);
  }
  group->issue();
  return group;
}

}  // namespace lowcomm
