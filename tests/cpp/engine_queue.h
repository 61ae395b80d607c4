#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "engine/op_queue.h"

namespace lowcomm::test {

// A queue over an engine that has no other submitters.
class EngineQueue : public OpQueue {
 public:
  // `engine` outlives this.
  explicit EngineQueue(Engine& engine) : engine_(engine) {}

  int rank() const override { return engine_.group().rank(); }
  int size() const override { return engine_.group().size(); }
  void submit(const std::string& op, uint32_t sequences, Engine::Job job, Engine::Done done) override {
    const uint32_t first = next_;
    next_ += sequences;
    engine_.submit(op, std::move(job), std::move(done), first);
  }

 protected:
  Engine& engine() override { return engine_; }

 private:
  Engine& engine_;
  uint32_t next_ = 1;
};

}  // namespace lowcomm::test
