#include "backend/inner_work.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <future>
#include <thread>

#include "base/error.h"
#include "base/signals.h"
#include "tensor/errors.h"
#include "tensor/python_state.h"

namespace lowcomm {
std::string InnerOpAccount::story() const {
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.3f", elapsed);
  return what + ", elapsed " + seconds + " s]";
}

void InnerOpAccount::succeeded() const {
  if (progress) progress->update([](OpProgress::State& state) { state.end(""); });
}

std::exception_ptr InnerOpAccount::failed(std::exception_ptr error) const {
  if (!error) return error;
  const auto living = engine.lock();
  const auto end = [this](const std::string& why) {
    if (progress) progress->update([&](OpProgress::State& state) { state.end(why); });
  };
  const auto told = asInnerError(error, story(), [&](const std::string& message, bool fault) -> std::string {
    if (!living) return "";
    if (progress && progress->over()) return living->record().named();
    if (fault) return living->fault(message, sequence, progress);
    end(message);
    return living->record().write(message);
  });
  end("the inner backend refused it");  // where it has not ended so: a caller's mistake
  return told;
}

InnerWork::InnerWork(WorkPtr inner, c10d::OpType type, int rank, uint64_t sequence, InnerOpAccount op, Tensors outputs)
    : c10d::Work(rank, type),
      inner_(std::move(inner)),
      op_(std::move(op)),
      sequence_(sequence),
      outputs_(std::move(outputs)) {}

bool InnerWork::isCompleted() {
  if (!inner_->isCompleted()) return false;
  if (!inner_->exception()) op_.succeeded();
  return true;
}

// Not by the inner Work's own isSuccess(), which WorkNCCL throws from.
bool InnerWork::isSuccess() const {
  if (!inner_->isCompleted() || inner_->exception()) return false;
  op_.succeeded();
  return true;
}

std::exception_ptr InnerWork::exception() const {
  std::exception_ptr error;
  blocking([&] { error = op_.failed(inner_->exception()); });  // which may end the group, and tell its peers
  return error;
}

bool InnerWork::wait(std::chrono::milliseconds timeout) {
  bool whole = false;
  std::exception_ptr error;
  blocking([&] {
    try {
      whole = inner_->wait(timeout);
    } catch (...) {
      // A time-out of the wait's own: the op goes on, and what becomes of it is told when it is known.
      const bool goes_on = !inner_->isCompleted();
      error = goes_on ? asInnerError(std::current_exception(), op_.story()) : op_.failed(std::current_exception());
    }
  });
  if (error) std::rethrow_exception(error);
  if (whole) op_.succeeded();
  return whole;
}

void GroupWork::add(WorkPtr part) {
  parts_.push_back(std::move(part));
}

WorkPtr GroupWork::start() {
  if (start_ && !issued_) {
    issued_ = true;  // whatever comes of it
    try {
      parts_.push_back(std::exchange(start_, nullptr)());
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  if (error_) std::rethrow_exception(error_);
  return parts_.empty() ? nullptr : parts_[0];
}

void GroupWork::fail(std::exception_ptr error) {
  if (issued_) return;
  issued_ = true;
  start_ = nullptr;
  error_ = std::move(error);
}

std::exception_ptr GroupWork::exception() const {
  if (error_) return error_;
  for (const auto& part : parts_) {
    if (auto error = part->exception()) return error;
  }
  return nullptr;
}

uint64_t GroupWork::getSequencenumber() const {
  return parts_.empty() ? 0 : parts_[0]->getSequencenumber();
}

bool GroupWork::isCompleted() {
  if (!issued_) return false;
  for (auto& part : parts_) {
    if (!part->isCompleted()) return false;
  }
  return true;
}

bool GroupWork::isSuccess() const {
  if (error_) return false;
  for (const auto& part : parts_) {
    if (!part->isSuccess()) return false;
  }
  return issued_;
}

int GroupWork::sourceRank() const {
  TORCH_CHECK(parts_.size() == 1, "lowcomm: source rank: expected a Work of one receive, got one of ", parts_.size(),
              " ops");
  return parts_[0]->sourceRank();
}

std::vector<at::Tensor> GroupWork::result() {
  std::vector<at::Tensor> all;
  for (auto& part : parts_) {
    for (auto& tensor : part->result())
      all.push_back(tensor);
  }
  return all;
}

void GroupWork::synchronize() {
  for (auto& part : parts_)
    part->synchronize();
}

bool GroupWork::wait(std::chrono::milliseconds timeout) {
  try {
    return waitForParts(timeout);
  } catch (...) {
    if (timeout != kNoTimeout || !keeps_ || !keeps_(std::current_exception())) throw;
  }
  return true;
}

bool GroupWork::waitForParts(std::chrono::milliseconds timeout) {
  start();
  TORCH_CHECK(issued_, "lowcomm: expected the coalescing block to have ended before its Work is waited for");
  std::exception_ptr first;
  bool whole = true;
  for (auto& part : parts_) {
    try {
      whole = part->wait(timeout) && whole;
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
  return whole;
}

void GroupWork::abort() {
  for (auto& part : parts_)
    part->abort();
}

// The current stream is made to wait for each part, in whose order the callback that is called by the last one is not.
FuturePtr GroupWork::getFuture() {
  try {
    start();
  } catch (...) {
    auto failed = tensorListFuture();
    failed->setError(std::current_exception());
    return failed;
  }
  c10::List<FuturePtr> futures(c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  std::vector<c10::Device> devices;
  for (auto& part : parts_) {
    futures.push_back(part->getFuture());
    for (const c10::Device& device : FuturePtr(futures.get(futures.size() - 1))->devices()) {
      if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
    }
  }
  auto all = tensorListFuture(std::move(devices));
  c10::collectAll(futures)->addCallback([all](c10::ivalue::Future& done) {
    try {
      c10::List<at::Tensor> tensors;
      for (const c10::IValue& part : done.value().toListRef()) {
        const FuturePtr future = part.toFuture();
        future->waitAndThrow();
        for (const at::Tensor& tensor : future->value().toTensorVector())
          tensors.push_back(tensor);
      }
      all->markCompleted(c10::IValue(std::move(tensors)));
    } catch (...) {
      all->setErrorIfNeeded(std::current_exception());
    }
  });
  return all;
}

}  // namespace lowcomm
