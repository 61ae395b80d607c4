// Point to point, and coalescing: inside a block point-to-point ops are put off, and at its end receives are posted
// before sends (a rank that sends first runs the exchange half-duplex). One implementation serves both devices.
#include "backend/backend.h"
#include "backend/errors.h"
#include "backend/python_state.h"

namespace lowcomm {

WorkPtr LowcommBackend::pointToPoint(c10d::OpType op, const char* name, Tensors tensors, bool receive,
                                     std::function<WorkPtr(c10d::Backend&)> call) {
  const bool device = !tensors.empty() && !tensors[0].device().is_cpu();
  auto issue = [this, op, name, tensors = std::move(tensors), receive, call = std::move(call)] {
    return viaInner(op, name, tensors, receive ? tensors : Tensors{}, call, /*collective=*/false);
  };
  if (!coalesced_) return issue();
  auto stand_in = c10::make_intrusive<GroupWork>(rank_, op);
  pending_.push_back({stand_in, std::move(issue), receive, device});
  return stand_in;
}

WorkPtr LowcommBackend::send(Tensors& tensors, int to, int tag) {
  return pointToPoint(c10d::OpType::SEND, "send", tensors, false,
                      [tensors, to, tag](c10d::Backend& inner) mutable { return inner.send(tensors, to, tag); });
}

WorkPtr LowcommBackend::recv(Tensors& tensors, int from, int tag) {
  return pointToPoint(c10d::OpType::RECV, "recv", tensors, true,
                      [tensors, from, tag](c10d::Backend& inner) mutable { return inner.recv(tensors, from, tag); });
}

WorkPtr LowcommBackend::recvAnysource(Tensors& tensors, int tag) {
  return pointToPoint(c10d::OpType::RECVANYSOURCE, "recv", tensors, true,
                      [tensors, tag](c10d::Backend& inner) mutable { return inner.recvAnysource(tensors, tag); });
}

void LowcommBackend::startCoalescing() {
  TORCH_CHECK(!coalesced_, "lowcomm: expected no coalescing block to be open when one starts");
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
      WorkPtr work = p.issue();
      p.work->add(work);
      p.work->issue();
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
