#include "backend/work.h"

#include <c10/util/Exception.h>

#include <condition_variable>
#include <deque>
#include <set>
#include <thread>

#include "base/signals.h"
#include "tensor/errors.h"
#include "tensor/python_state.h"

namespace lowcomm {

FuturePtr tensorListFuture(std::vector<c10::Device> devices) {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::move(devices));
}

const char* profilerTitle(const std::string& backend, const std::string& op) {
  static std::mutex mutex;
  static auto* titles = new std::set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  return titles->insert(backend + ":" + op).first->c_str();
}

EngineWork::EngineWork(int rank, c10d::OpType type, const char* title, Name name, Tensors inputs, Tensors outputs,
                       std::shared_ptr<CallbackThreads> threads, DeviceQueue* queue)
    : c10d::Work(rank, type, title, inputs),
      name_(std::move(name)),
      inputs_(std::move(inputs)),
      outputs_(std::move(outputs)),
      threads_(std::move(threads)),
      queue_(queue),
      future_(tensorListFuture(queue ? std::vector<c10::Device>{queue->device()} : std::vector<c10::Device>{})) {}

bool EngineWork::wait(std::chrono::milliseconds timeout) {
  bool done = true;
  const auto ended = [this](std::chrono::milliseconds patience) {
    std::unique_lock<std::mutex> lock(mutex_);
    return cv_.wait_for(lock, patience, [&] { return completed_; });
  };
  const auto interrupt = [this](const std::string& name) {
    if (const auto engine = name_.engine.lock()) engine->interrupt(name_.op, name);
  };
  blocking([&] { done = waitWithSignals(timeout, ended, interrupt); });
  TORCH_CHECK_WITH(DistBackendError, done, "lowcomm: waiting for ", name_.op, " on rank ", rank_,
                   ": expected its end within ", timeout.count(), " ms; it goes on [op ", name_.op, ", sequence ",
                   name_.sequence, ", group ", name_.group, "]");
  if (auto error = exception()) std::rethrow_exception(error);
  return true;
}

FuturePtr EngineWork::getFuture() {
  std::lock_guard<std::mutex> lock(future_mutex_);
  asked_ = true;
  return future_;
}

void EngineWork::tell(std::exception_ptr error) {
  if (error) {
    future_->setErrorIfNeeded(error);
  } else if (queue_) {
    queue_->run([&] { future_->markCompleted(c10::IValue(outputs_)); });
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
}

void EngineWork::complete(std::exception_ptr error) {
  inputs_.clear();
  bool asked;
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    asked = asked_;
    if (!asked) tell(error);  // nobody can have a callback on it yet
  }
  // The event of its title ends in the profiler's memory, which is gone with a profiler that was stopped since, and
  // would end there when it is dropped too: it is left for good.
  if (recordFunctionEndCallback_ && !profiler_.running()) {
    new std::function<void()>(std::exchange(recordFunctionEndCallback_, nullptr));
  }
  finish(error);
  if (asked) {
    auto self = c10::intrusive_ptr<EngineWork>::reclaim_copy(this);
    threads_->run([self, error] {
      if (self->queue_) DeviceQueue::occupy(self->queue_->device());
      self->tell(error);
    });
  }
}

struct CallbackThreads::State {
  std::mutex mutex;
  std::condition_variable changed, rested;
  std::deque<std::function<void()>> ready;
  std::vector<std::thread> threads;
  size_t idle = 0;
  bool stopping = false;

  void loop() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      ++idle;
      rested.notify_all();
      changed.wait(lock, [&] { return stopping || !ready.empty(); });
      --idle;
      if (ready.empty()) return;
      std::function<void()> task = std::move(ready.front());
      ready.pop_front();
      lock.unlock();
      task();
      task = {};  // what it holds is destroyed without the lock
      lock.lock();
    }
  }
};

CallbackThreads::CallbackThreads() : state_(std::make_shared<State>()) {}

CallbackThreads::~CallbackThreads() {
  stop();
}

void CallbackThreads::run(std::function<void()> task) {
  State& s = *state_;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    if (!s.stopping) {
      s.ready.push_back(std::move(task));
      if (s.idle < s.ready.size()) s.threads.emplace_back([state = state_] { state->loop(); });
      s.changed.notify_one();
      return;
    }
  }
  task();
}

bool CallbackThreads::idleWithin(std::chrono::milliseconds patience) {
  State& s = *state_;
  std::unique_lock<std::mutex> lock(s.mutex);
  return s.rested.wait_for(lock, patience,
                           [&] { return s.stopping || (s.ready.empty() && s.idle == s.threads.size()); });
}

void CallbackThreads::stop() {
  State& s = *state_;
  std::vector<std::thread> threads;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.stopping = true;
    threads.swap(s.threads);
  }
  s.changed.notify_all();
  for (std::thread& thread : threads) {
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();  // a callback that destroys its group
    } else {
      thread.join();
    }
  }
}

MessageWork::MessageWork(int rank, c10d::OpType type, const char* title, Name name, Tensors tensors,
                         std::shared_ptr<const std::atomic<int>> source, std::shared_ptr<CallbackThreads> threads,
                         std::shared_ptr<DeviceQueue> queue, Finish finish)
    : EngineWork(rank, type, title, std::move(name), tensors, source ? tensors : Tensors{}, threads, queue.get()),
      source_(std::move(source)),
      threads_(std::move(threads)),
      queue_(std::move(queue)),
      finish_(std::move(finish)) {}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  if (timeout != kNoTimeout || handlesSignals()) {
    finishBeside();
  } else if (!claimed_.exchange(true)) {
    blocking([&] { finishHere(); });
  }
  return EngineWork::wait(timeout);
}

bool MessageWork::isCompleted() {
  finishBeside();
  return EngineWork::isCompleted();
}

FuturePtr MessageWork::getFuture() {
  auto future = EngineWork::getFuture();
  finishBeside();
  return future;
}

void MessageWork::finishHere() {
  const std::exception_ptr error = finish_();
  finish_ = nullptr;
  complete(error);
}

void MessageWork::finishBeside() {
  if (claimed_.exchange(true)) return;
  auto self = c10::intrusive_ptr<MessageWork>::reclaim_copy(this);
  threads_->run([self] {
    if (self->queue_) DeviceQueue::occupy(self->queue_->device());
    self->finishHere();
  });
}

}  // namespace lowcomm
