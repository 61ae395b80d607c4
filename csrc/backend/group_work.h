#pragma once

#include <functional>
#include <utility>

#include "backend/work.h"

namespace lowcomm {

// Several Works as one, and the stand-in for an op whose start a coalescing block puts off: parts are added until
// issue(), wait() waits for all of them and throws the first error. A stand-in that is waited for inside the block (or
// after an exception has left it open) starts its op then.
class GroupWork : public c10d::Work {
 public:
  GroupWork(int rank, c10d::OpType type) : c10d::Work(rank, type) {}

  void add(WorkPtr part);
  void issue() { issued_ = true; }
  bool issued() const { return issued_; }

  // A stand-in: `start` issues its op, once. `keeps` says whether somebody else raises an error that a wait without a
  // time-out meets; such a wait returns.
  void standFor(std::function<WorkPtr()> start, std::function<bool(std::exception_ptr)> keeps) {
    start_ = std::move(start);
    keeps_ = std::move(keeps);
  }
  // Issues it, if nobody has, and returns its Work. What it throws is this Work's error from then on.
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
  // Of the tensors of all parts.
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
