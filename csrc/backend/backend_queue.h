#pragma once

#include <exception>
#include <memory>
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
  GroupContext& group() override { return engine().group(); }
  void send(const std::shared_ptr<P2pSend>& message, std::unique_ptr<Source> source) override {
    sendOver(engine(), message, std::move(source));
  }
  void recv(const std::shared_ptr<P2pRecv>& message, std::unique_ptr<Sink> sink) override {
    recvOver(engine(), message, std::move(sink));
  }
  // Counted whether it is delivered or not, under its edge's name.
  void finish(P2pMessage& message) override {
    const auto error = messageEnded(engine(), message);
    const std::string name = message.countedAs();
    backend_->parts().group.stats.call(name, !message.plan.layout.coded());
    backend_->parts().group.stats.moved(name, message.op.counters);
    if (error) std::rethrow_exception(error);
  }

 private:
  Engine& engine() { return backend_->parts().group.engine(); }

  const c10::intrusive_ptr<LowcommBackend> backend_;
};

}  // namespace lowcomm
