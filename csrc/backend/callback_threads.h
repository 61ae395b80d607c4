#pragma once

#include <chrono>
#include <functional>
#include <memory>

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

  // Runs `task` (which must not throw) on one of the threads; after stop(), on the caller's. `cancel`, where there is
  // one, makes a task that waits return soon; stop() calls it, from another thread, while the task is under way.
  void run(std::function<void()> task, std::function<void()> cancel = {});

  // Held by whoever will run() a task when something else has ended: idleWithin() waits for those, too.
  std::shared_ptr<void> expect();

  // Whether every task has ended, and let go of what it held, within `patience`.
  bool idleWithin(std::chrono::milliseconds patience);

  // Cancels what can be, returns when every task has ended (but the one that calls it). Any number of times.
  void stop();

 private:
  struct State;  // shared with the threads: one of them may be the last to let go of the group
  std::shared_ptr<State> state_;
};

}  // namespace lowcomm
