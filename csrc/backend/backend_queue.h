#pragma once

#include "backend/backend.h"
#include "engine/op_queue.h"

namespace lowcomm {

// A backend's engine as a queue: ops are counted in the group's stats and numbered with its others.
class BackendQueue : public OpQueue {
 public:
  explicit BackendQueue(c10::intrusive_ptr<LowcommBackend> backend) : backend_(std::move(backend)) {}

  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }
  void submit(const std::string& op, uint32_t sequences, Engine::Job job, Engine::Done done) override {
    backend_->queueOwn(op, sequences, std::move(job), std::move(done));
  }

 private:
  const c10::intrusive_ptr<LowcommBackend> backend_;
};

}  // namespace lowcomm
