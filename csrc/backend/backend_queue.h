#pragma once

#include <string>
#include <utility>

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
    backend_->parts().issuer.submitJob(op, sequences, std::move(job), std::move(done));
  }
  // Counted whether it is delivered or not, under its edge's name.
  void finish(P2pMessage& message) override {
    struct Count {
      Stats& stats;
      const P2pMessage& message;
      ~Count() {
        const std::string name = message.countedAs();
        stats.call(name, !message.plan.layout.coded());
        stats.moved(name, message.op.counters);
      }
    } count{backend_->parts().group.stats, message};
    OpQueue::finish(message);
  }

 protected:
  Engine& engine() override { return backend_->parts().group.engine(); }

 private:
  const c10::intrusive_ptr<LowcommBackend> backend_;
};

}  // namespace lowcomm
