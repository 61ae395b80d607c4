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
    backend_->queueOwn(op, sequences, std::move(job), std::move(done));
  }
  GroupContext& group() override { return backend_->engine().group(); }
  void send(const std::shared_ptr<P2pSend>& message, std::unique_ptr<Source> source) override {
    sendOver(backend_->engine(), message, std::move(source));
  }
  void recv(const std::shared_ptr<P2pRecv>& message, std::unique_ptr<Sink> sink) override {
    recvOver(backend_->engine(), message, std::move(sink));
  }
  // Counted as c10d's messages are, whether it is delivered or not.
  void finish(P2pMessage& message) override {
    const auto error = messageEnded(backend_->engine(), message);
    const char* name = message.sends ? "send" : "recv";
    backend_->stats().call(name, !message.plan.layout.coded());
    backend_->stats().moved(name, message.op.counters);
    if (error) std::rethrow_exception(error);
  }

 private:
  const c10::intrusive_ptr<LowcommBackend> backend_;
};

}  // namespace lowcomm
