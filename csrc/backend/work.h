#pragma once

#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace lowcomm {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

// "lowcomm:all_gather": what the profiler shows for an op. The text lives as long as the process, as the profiler
// needs.
const char* profilerTitle(const std::string& backend, const std::string& op);

// An op of lowcomm's own: completed by the worker, with a future (a list of the output tensors) that needs no wait().
class EngineWork : public c10d::Work {
 public:
  EngineWork(int rank, c10d::OpType op, const char* title, Tensors inputs, Tensors outputs);

  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  // Blocks until the op is done or `timeout` is over, and rethrows its error.
  bool wait(std::chrono::milliseconds timeout) override;

  // For outputs on a device: makes the caller's stream wait for the last copy. Done by wait() too.
  void synchronize() override;

  void setSequence(uint64_t sequence) { sequence_ = sequence; }
  void setSynchronize(std::function<void()> synchronize) { synchronize_ = std::move(synchronize); }

  // Called once, by the worker; drops the inputs and whatever they kept alive first.
  void complete(std::exception_ptr error);

 private:
  Tensors inputs_, outputs_;
  uint64_t sequence_ = 0;
  std::function<void()> synchronize_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// An op the inner backend serves. Everything is the inner Work's, but its errors carry lowcomm's account of the op, its
// sequence number is the group's, and a future exists where gloo has none (point to point).
class InnerWork : public c10d::Work {
 public:
  // `finish`, where there is one, runs once, when the op has succeeded and before anybody is told.
  InnerWork(WorkPtr inner, c10d::OpType op, int rank, uint64_t sequence, std::string context, Tensors outputs,
            std::function<void()> finish = {});
  ~InnerWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override;
  void synchronize() override { inner_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override;
  void blockCurrentStream() override { inner_->blockCurrentStream(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return sequence_; }

  // The inner Work and the outcome of waiting for it. Gloo's point-to-point Works can be waited for once only (a second
  // wait would block until its time-out), so theirs is kept, and shared with the thread that completes a future.
  struct Outcome {
    WorkPtr inner;
    std::string context;
    bool once = false;
    std::function<void()> finish;
    std::once_flag finished;
    void succeed() {
      if (finish) std::call_once(finished, finish);
    }
    std::mutex mutex;
    bool settled = false, whole = false;
    std::exception_ptr error;
    bool settle(std::chrono::milliseconds timeout);
  };

 private:
  std::shared_ptr<Outcome> outcome_;
  WorkPtr inner_;
  uint64_t sequence_;
  Tensors outputs_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::thread waiter_;  // only where a future was asked of a Work that has none
};

// Several Works as one, and the stand-in for an op whose start a coalescing block puts off: parts are added until
// issue(), wait() waits for all of them and throws the first error.
class GroupWork : public c10d::Work {
 public:
  GroupWork(int rank, c10d::OpType op) : c10d::Work(rank, op) {}

  void add(WorkPtr part);
  void issue() { issued_ = true; }

  bool isCompleted() override;
  bool isSuccess() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<WorkPtr> parts_;
  bool issued_ = false;
};

}  // namespace lowcomm
