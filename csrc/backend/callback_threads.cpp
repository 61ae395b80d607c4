#include "backend/callback_threads.h"

#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

namespace lowcomm {

struct CallbackThreads::State {
  struct Task {
    std::function<void()> body, cancel;
  };

  std::mutex mutex;
  std::condition_variable changed, rested;
  std::deque<Task> ready;
  std::list<std::function<void()>> cancels;  // of the tasks under way
  std::vector<std::thread> threads;
  size_t idle = 0, expected = 0;
  bool stopping = false;

  void loop() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      ++idle;
      rested.notify_all();
      changed.wait(lock, [&] { return stopping || !ready.empty(); });
      --idle;
      if (ready.empty()) return;
      Task task = std::move(ready.front());
      ready.pop_front();
      const auto cancel = cancels.insert(cancels.end(), std::move(task.cancel));
      lock.unlock();
      task.body();
      task = {};  // what it holds goes without the lock
      lock.lock();
      std::function<void()> done = std::move(*cancel);
      cancels.erase(cancel);
      lock.unlock();
      done = {};
      lock.lock();
    }
  }
};

CallbackThreads::CallbackThreads() : state_(std::make_shared<State>()) {}

CallbackThreads::~CallbackThreads() {
  stop();
}

void CallbackThreads::run(std::function<void()> task, std::function<void()> cancel) {
  State& s = *state_;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    if (!s.stopping) {
      s.ready.push_back({std::move(task), std::move(cancel)});
      if (s.idle < s.ready.size()) s.threads.emplace_back([state = state_] { state->loop(); });
      s.changed.notify_one();
      return;
    }
  }
  if (cancel) cancel();
  task();
}

std::shared_ptr<void> CallbackThreads::expect() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  ++state_->expected;
  return {state_.get(), [state = state_](void*) {
            std::lock_guard<std::mutex> lock(state->mutex);
            --state->expected;
            state->rested.notify_all();
          }};
}

bool CallbackThreads::idleWithin(std::chrono::milliseconds patience) {
  State& s = *state_;
  std::unique_lock<std::mutex> lock(s.mutex);
  return s.rested.wait_for(lock, patience, [&] {
    return s.expected == 0 && (s.stopping || (s.ready.empty() && s.idle == s.threads.size()));
  });
}

void CallbackThreads::stop() {
  State& s = *state_;
  std::vector<std::thread> threads;
  std::vector<std::function<void()>> cancels;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.stopping = true;
    threads.swap(s.threads);
    cancels.assign(s.cancels.begin(), s.cancels.end());
    for (const State::Task& task : s.ready)
      cancels.push_back(task.cancel);
  }
  s.changed.notify_all();
  for (auto& cancel : cancels) {
    if (cancel) cancel();
  }
  for (std::thread& thread : threads) {
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();  // a callback that destroys its group
    } else {
      thread.join();
    }
  }
}

}  // namespace lowcomm
