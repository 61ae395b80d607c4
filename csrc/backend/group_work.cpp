#include "backend/group_work.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace lowcomm {

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
