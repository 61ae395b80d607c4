#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "backend/work.h"
#include "engine/engine.h"

namespace lowcomm {

// The account of an op that the inner backend serves: its errors carry it.
struct InnerOpAccount {
  std::string what;  // "lowcomm: all_reduce failed on rank 0 of 2 [op all_reduce, ..."
  std::chrono::steady_clock::time_point start;
  std::weak_ptr<Engine> engine = {};          // whose flight record it stands in
  std::shared_ptr<OpProgress> progress = {};  // null where nothing is recorded
  uint32_t sequence = 0;

  std::string story() const;  // with the time elapsed

  // The inner backend's error as lowcomm's (asInnerError). A fault of a peer or the network ends the group. Of others
  // the first writes the flight record, which is named at the message's end either way.
  std::exception_ptr failed(std::exception_ptr error) const;

  // For the flight record: it ended well.
  void succeeded() const;
};

// An op that the inner backend serves. Everything is the inner Work's, but its errors carry lowcomm's account of the
// op, and its sequence number is the group's.
class InnerWork : public c10d::Work {
 public:
  InnerWork(WorkPtr inner, c10d::OpType type, int rank, uint64_t sequence, InnerOpAccount op, Tensors outputs);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return outputs_.empty() ? inner_->result() : outputs_; }
  void synchronize() override { inner_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override;
  void blockCurrentStream() override { inner_->blockCurrentStream(); }
  void abort() override { inner_->abort(); }
  FuturePtr getFuture() override { return inner_->getFuture(); }
  FuturePtr getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  const WorkPtr inner_;
  const InnerOpAccount op_;
  const uint64_t sequence_;
  const Tensors outputs_;
};

// Several Works as one, and the stand-in for an op whose start a coalescing block puts off: parts are added until
// issue(), wait() waits for all of them and throws the first error. A stand-in that is waited for inside the block (or
// after an exception has left it open) starts its op then.
class GroupWork : public c10d::Work {
 public:
  GroupWork(int rank, c10d::OpType type) : c10d::Work(rank, type) {}

  void add(WorkPtr part);
  void issue() { issued_ = true; }
  bool issued() const { return issued_; }

  // A stand-in: `start` issues its op, once. `keeps` returns whether another thread will raise the error that a wait
  // without a time-out meets; such a wait returns.
  void standFor(std::function<WorkPtr()> start, std::function<bool(std::exception_ptr)> keeps) {
    start_ = std::move(start);
    keeps_ = std::move(keeps);
  }
  // Issues the op unless it was issued, and returns its Work. An exception becomes this Work's error.
  WorkPtr start();
  // Ends one that was not issued with an error, in place of its start.
  void fail(std::exception_ptr error);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  uint64_t getSequencenumber() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  // A future of the tensors of all parts.
  FuturePtr getFuture() override;

 private:
  bool waitForParts(std::chrono::milliseconds timeout);

  std::vector<WorkPtr> parts_;
  std::function<WorkPtr()> start_;
  std::function<bool(std::exception_ptr)> keeps_;
  std::exception_ptr error_;  // of the start
  bool issued_ = false;
};

}  // namespace lowcomm
