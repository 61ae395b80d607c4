#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backend/stats.h"
#include "engine/engine.h"
#include "tensor/device_queue.h"

namespace lowcomm {

// Threads on which others learn that an op has ended. A future's callbacks are anybody's code and may wait for further
// ops of the same group (torch's quantization hooks do), so they never run on the worker, and no task waits for another
// one: a task takes an idle thread or gets a new one. Without futures no thread is ever started. Thread-safe.
class CallbackThreads {
 public:
  CallbackThreads();
  ~CallbackThreads();  // as stop()
  CallbackThreads(const CallbackThreads&) = delete;
  CallbackThreads& operator=(const CallbackThreads&) = delete;

  // Runs `task` (which must not throw) on one of the threads; after stop(), on the caller's.
  void run(std::function<void()> task);

  // Whether every task has ended, and let go of what it held, within `patience`.
  bool idleWithin(std::chrono::milliseconds patience);

  // Returns when every task has ended, except the one that calls it. Any number of times.
  void stop();

 private:
  struct State;  // shared with the threads: one of them may be the last to let go of the group
  std::shared_ptr<State> state_;
};

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using Tensors = std::vector<at::Tensor>;

// A future of a list of tensors. With devices, a callback has streams of its own, and a thread that waits for the
// future's result waits for these.
FuturePtr tensorListFuture(std::vector<c10::Device> devices = {});

// "lowcomm:all_gather": what the profiler shows for an op. The text lives as long as the process, as the profiler
// needs.
const char* profilerTitle(const std::string& backend, const std::string& op);

// An op of lowcomm's own: completed by the worker, with a future (a list of the output tensors) that needs no wait().
class EngineWork : public c10d::Work {
 public:
  // An op's name in messages, and the engine of its group.
  struct Name {
    std::string op, group;
    uint64_t sequence = 0;
    std::weak_ptr<Engine> engine;
  };

  // `queue`: the device queue that fills the outputs, null for host tensors. `threads` run the future's callbacks.
  EngineWork(int rank, c10d::OpType type, const char* title, Name name, Tensors inputs, Tensors outputs,
             std::shared_ptr<CallbackThreads> threads, DeviceQueue* queue = nullptr);

  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return name_.sequence; }
  FuturePtr getFuture() override;

  // Blocks until the op is done and rethrows its error. DistBackendError when `timeout` is over first: the op goes on.
  // Handlers of signals run meanwhile: throws what one raised, which ends the group.
  bool wait(std::chrono::milliseconds timeout) override;

  // Nothing is left to wait for where an op has ended: outputs on a device are written by then.
  void synchronize() override {}

  // Called once, by the worker, when the outputs are written; drops the inputs and whatever they kept alive first.
  void complete(std::exception_ptr error);

 private:
  void tell(std::exception_ptr error);

  const Name name_;
  Tensors inputs_, outputs_;
  const std::shared_ptr<CallbackThreads> threads_;
  DeviceQueue* const queue_;
  std::mutex future_mutex_;
  bool asked_ = false;  // somebody holds the future, and may have callbacks on it
  FuturePtr future_;
  const ProfilerHere profiler_;  // that shows its title
};

// The Work of a message between two ranks, of a tag or of a channel. No thread works on it until it is asked for:
// wait() without a time-out finishes it on the caller's thread, unless that handles signals; everything else (a future,
// a poll, a wait with a time-out, which must not cost the group its lane) on one of the callback threads.
class MessageWork : public EngineWork {
 public:
  // Waits until the message is through; returns its error, as torch's. Called once.
  using Finish = std::function<std::exception_ptr()>;

  // `tensors` are the outputs of a receive, `source` its sender, below 0 until it is known; null of a send. `queue`:
  // the device queue that fills them, null for host tensors.
  MessageWork(int rank, c10d::OpType type, const char* title, Name name, Tensors tensors,
              std::shared_ptr<const std::atomic<int>> source, std::shared_ptr<CallbackThreads> threads,
              std::shared_ptr<DeviceQueue> queue, Finish finish);

  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override;
  FuturePtr getFuture() override;
  int sourceRank() const override { return source_ && *source_ >= 0 ? source_->load() : c10d::Work::sourceRank(); }

 private:
  void finishHere();
  void finishBeside();

  const std::shared_ptr<const std::atomic<int>> source_;
  const std::shared_ptr<CallbackThreads> threads_;
  const std::shared_ptr<DeviceQueue> queue_;  // outlives the group's
  Finish finish_;
  std::atomic<bool> claimed_{false};
};

}  // namespace lowcomm
