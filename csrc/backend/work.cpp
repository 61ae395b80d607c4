#include "backend/work.h"

#include <mutex>
#include <set>

#include "backend/errors.h"
#include "backend/python_state.h"

namespace lowcomm {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

FuturePtr tensorListFuture() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

}  // namespace

const char* profilerTitle(const std::string& backend, const std::string& op) {
  static std::mutex mutex;
  static auto* titles = new std::set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  return titles->insert(backend + ":" + op).first->c_str();
}

EngineWork::EngineWork(int rank, c10d::OpType op, const char* title, Tensors inputs, Tensors outputs)
    : c10d::Work(rank, op, title, inputs),
      inputs_(std::move(inputs)),
      outputs_(std::move(outputs)),
      future_(tensorListFuture()) {}

bool EngineWork::wait(std::chrono::milliseconds timeout) {
  blocking([&] { c10d::Work::wait(timeout); });
  return true;
}

void EngineWork::synchronize() {
  if (synchronize_) synchronize_();
}

void EngineWork::complete(std::exception_ptr error) {
  inputs_.clear();
  // The future first: whoever wait() lets go on finds it done.
  if (error) {
    future_->setErrorIfNeeded(error);
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
  finish(error);
}

InnerWork::InnerWork(WorkPtr inner, c10d::OpType op, int rank, uint64_t sequence, std::string context, Tensors outputs,
                     std::function<void()> finish)
    : c10d::Work(rank, op),
      outcome_(std::make_shared<Outcome>()),
      inner_(std::move(inner)),
      sequence_(sequence),
      outputs_(std::move(outputs)) {
  outcome_->inner = inner_;
  outcome_->context = std::move(context);
  outcome_->once = c10d::isP2POp(op);
  outcome_->finish = std::move(finish);
}

InnerWork::~InnerWork() {
  if (!waiter_.joinable()) return;
  // The waiter may be the one that drops the last reference.
  if (waiter_.get_id() == std::this_thread::get_id()) {
    waiter_.detach();
  } else {
    blocking([&] { waiter_.join(); });
  }
}

bool InnerWork::isCompleted() {
  return inner_->isCompleted();
}
bool InnerWork::isSuccess() const {
  return inner_->isSuccess();
}
std::exception_ptr InnerWork::exception() const {
  return asInnerError(inner_->exception(), outcome_->context);
}

std::vector<at::Tensor> InnerWork::result() {
  if (outcome_->finish) return outputs_;
  try {
    return inner_->result();
  } catch (const c10::Error&) {
    return outputs_;  // gloo's point-to-point Works have none
  }
}

bool InnerWork::Outcome::settle(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex, std::defer_lock);
  if (once) lock.lock();
  if (!settled) {
    std::exception_ptr failed;
    bool waited = false;
    try {
      waited = inner->wait(timeout);
    } catch (...) {
      failed = asInnerError(std::current_exception(), context);
    }
    if (!once) {
      if (failed) std::rethrow_exception(failed);
      if (waited) succeed();
      return waited;
    }
    settled = true;
    whole = waited;
    error = failed;
  }
  if (error) std::rethrow_exception(error);
  if (whole) succeed();
  return whole;
}

bool InnerWork::wait(std::chrono::milliseconds timeout) {
  bool whole = false;
  blocking([&] { whole = outcome_->settle(timeout); });
  return whole;
}

FuturePtr InnerWork::getFuture() {
  std::lock_guard<std::mutex> lock(future_mutex_);
  if (future_) return future_;
  try {
    future_ = inner_->getFuture();
    if (future_ && outcome_->finish) {
      future_ = future_->then(
          [outcome = outcome_, outputs = outputs_](c10::ivalue::Future& done) {
            done.value();  // rethrows its error
            outcome->succeed();
            return c10::IValue(outputs);
          },
          c10::ListType::create(c10::TensorType::get()));
    }
    if (future_) return future_;
  } catch (const c10::Error&) {
    // None of its own: one is made below.
  }
  future_ = tensorListFuture();
  waiter_ = std::thread([outcome = outcome_, future = future_, outputs = outputs_] {
    try {
      outcome->settle(kNoTimeout);
      future->markCompleted(c10::IValue(outputs));
    } catch (...) {
      future->setErrorIfNeeded(std::current_exception());
    }
  });
  return future_;
}

void GroupWork::add(WorkPtr part) {
  parts_.push_back(std::move(part));
}

bool GroupWork::isCompleted() {
  if (!issued_) return false;
  for (auto& part : parts_) {
    if (!part->isCompleted()) return false;
  }
  return true;
}

bool GroupWork::isSuccess() const {
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
  TORCH_CHECK(issued_, "lowcomm: waited for an op inside the coalescing block that has yet to start it");
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

FuturePtr GroupWork::getFuture() {
  c10::List<FuturePtr> futures(c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (auto& part : parts_)
    futures.push_back(part->getFuture());
  return c10::collectAll(futures);
}

}  // namespace lowcomm
