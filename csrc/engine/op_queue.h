#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>

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
  virtual GroupContext& group() = 0;

  // Messages between two ranks (collective/p2p.h), on the calling thread, beside what is queued. Throw what P2p throws,
  // by the engine's rules: a fault ends the group.
  virtual void send(const std::shared_ptr<P2pSend>& message, std::unique_ptr<Source> source) = 0;
  virtual void recv(const std::shared_ptr<P2pRecv>& message, std::unique_ptr<Sink> sink) = 0;
  virtual void finish(P2pMessage& message) = 0;
};

// Messages over an engine, as OpQueue has them.
inline void sendOver(Engine& engine, const std::shared_ptr<P2pSend>& message, std::unique_ptr<Source> source) {
  const auto part = [&] { engine.messages().send(message, std::move(source)); };
  if (auto error = engine.runInline(message->op, part)) std::rethrow_exception(error);
}
inline void recvOver(Engine& engine, const std::shared_ptr<P2pRecv>& message, std::unique_ptr<Sink> sink) {
  const auto part = [&] { engine.messages().recv(message, std::move(sink)); };
  if (auto error = engine.runInline(message->op, part)) std::rethrow_exception(error);
}
// The message's error; null where it was delivered.
inline std::exception_ptr messageEnded(Engine& engine, P2pMessage& message) {
  return engine.runInline(message.op, [&] { engine.messages().finish(message); });
}

// A queue over an engine that nobody else submits to.
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
  GroupContext& group() override { return engine_.group(); }
  void send(const std::shared_ptr<P2pSend>& message, std::unique_ptr<Source> source) override {
    sendOver(engine_, message, std::move(source));
  }
  void recv(const std::shared_ptr<P2pRecv>& message, std::unique_ptr<Sink> sink) override {
    recvOver(engine_, message, std::move(sink));
  }
  void finish(P2pMessage& message) override {
    if (auto error = messageEnded(engine_, message)) std::rethrow_exception(error);
  }

 private:
  Engine& engine_;
  uint32_t next_ = 1;
};

// An op that was queued, for one thread to wait for.
class Ticket {
 public:
  Ticket() = default;

  // Queues `job`. What it refers to must live until wait() has returned or thrown.
  Ticket(OpQueue& queue, const std::string& op, uint32_t sequences, Engine::Job job) {
    auto ended = std::make_shared<std::promise<OpCounters>>();
    ended_ = ended->get_future();
    queue.submit(op, sequences, std::move(job), [ended](std::exception_ptr error, const OpCounters& counters) {
      error ? ended->set_exception(error) : ended->set_value(counters);
    });
  }

  // Whether there is an op that nobody has waited for yet.
  bool pending() const { return ended_.valid(); }

  // What the op moved; throws what it threw. Once. The group's progress deadline bounds the wait.
  OpCounters wait() { return ended_.get(); }

 private:
  std::future<OpCounters> ended_;
};

}  // namespace lowcomm
