#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/signals.h"
#include "engine/engine.h"

namespace lowcomm {

// A queue for the ops and messages of an object that keeps state between them, as DiLoCoX does: a group's engine, or a
// backend around one that counts what moved.
class OpQueue {
 public:
  virtual ~OpQueue() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Queues an op that takes `sequences` of the group's sequence numbers, behind all before it; every rank queues the
  // same ones in the same order. `done` as Engine::Done.
  virtual void submit(const std::string& op, uint32_t sequences, Engine::Job job, Engine::Done done) = 0;

  // The group in which messages are made: its frames, names and deadline.
  GroupContext& group() { return engine().group(); }

  // Messages between two ranks (messages/p2p.h), on the calling thread, next to what is queued. Throw what P2p
  // throws, by the engine's rules: a fault ends the group.
  void send(const std::shared_ptr<P2pSend>& message, std::unique_ptr<Source> source) {
    run(message->op, [&](P2p& messages) { messages.send(message, std::move(source)); });
  }
  void recv(const std::shared_ptr<P2pRecv>& message, std::unique_ptr<Sink> sink) {
    run(message->op, [&](P2p& messages) { messages.recv(message, std::move(sink)); });
  }
  // Handlers of signals run meanwhile (Engine::waitInline).
  virtual void finish(P2pMessage& message) {
    const auto error = engine().waitInline(message.op, [&] { engine().messages().finish(message); });
    if (error) std::rethrow_exception(error);
  }

  // Engine::interrupt of the group.
  void interrupt(const std::string& op, const std::string& name) { engine().interrupt(op, name); }

  // As above for P2p::withdraw, withdrawn and resume.
  void withdraw(int peer, uint32_t block, const std::string& why) {
    OpContext op(group(), "withdraw from block " + std::to_string(block), 0);
    run(op, [&](P2p& messages) { messages.withdraw(peer, block, why); }, /*recorded=*/true);
  }
  std::string withdrawn(int peer, uint32_t block) { return engine().messages().withdrawn(peer, block); }
  void resume(int peer, uint32_t block) {
    OpContext op(group(), "resume block " + std::to_string(block), 0);
    run(op, [&](P2p& messages) { messages.resume(op, peer, block); }, /*recorded=*/true);
  }

 protected:
  virtual Engine& engine() = 0;

 private:
  // `recorded`: the op's whole run; its end is the op's in the flight record.
  void run(OpContext& op, const std::function<void(P2p&)>& part, bool recorded = false) {
    const auto error = engine().waitInline(op, [&] {
      if (recorded) op.note([](OpProgress::State& state) { state.start(); });
      part(engine().messages());
      if (recorded) op.note([](OpProgress::State& state) { state.end(""); });
    });
    if (error) std::rethrow_exception(error);
  }
};

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

// An op that was queued, for one thread to wait for.
class Ticket {
 public:
  Ticket() = default;

  // Queues `job`. What it refers to, and the queue, must live until wait() has returned or thrown.
  Ticket(OpQueue& queue, const std::string& op, uint32_t sequences, Engine::Job job) : queue_(&queue), op_(op) {
    auto ended = std::make_shared<std::promise<OpCounters>>();
    ended_ = ended->get_future();
    queue.submit(op, sequences, std::move(job), [ended](std::exception_ptr error, const OpCounters& counters) {
      error ? ended->set_exception(error) : ended->set_value(counters);
    });
  }

  // Whether there is an op that has not been waited for yet.
  bool pending() const { return ended_.valid(); }

  // Whether the op has ended, or does within this time.
  bool endsWithin(std::chrono::milliseconds patience) const {
    return ended_.wait_for(patience) == std::future_status::ready;
  }

  // Returns what the op moved; throws what it threw. Once. The group's progress deadline bounds the wait. Handlers of
  // signals run meanwhile: throws what one raised, which ends the group.
  OpCounters wait() {
    waitWithSignals(
        std::chrono::milliseconds(0), [this](std::chrono::milliseconds patience) { return endsWithin(patience); },
        [this](const std::string& name) { queue_->interrupt(op_, name); });
    return ended_.get();
  }

 private:
  OpQueue* queue_ = nullptr;
  std::string op_;
  std::future<OpCounters> ended_;
};

// Every rank's numbers, by rank, as a part of an op that is running: it takes op.sequence. All ranks give equally many.
// Collective over the op's group. Throws as runExchange.
std::vector<std::vector<double>> gatherNumbers(const std::vector<double>& mine, OpContext& op);

// The same as an op. All ranks give equally many; `what` names the op. Collective over the queue's group.
// Throws as runExchange.
std::vector<std::vector<double>> gatherNumbers(const std::vector<double>& mine, OpQueue& queue,
                                               const std::string& what);

// Every rank's number, by rank.
std::vector<double> gatherNumber(double mine, OpQueue& queue, const std::string& what);

// Every rank's text, by rank, of any lengths. Two ops.
std::vector<std::string> gatherTexts(const std::string& mine, OpQueue& queue, const std::string& what);

}  // namespace lowcomm
