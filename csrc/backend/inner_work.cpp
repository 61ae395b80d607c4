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
namespace {

std::function<void()> abortOf(const WorkPtr& inner) {
  return [inner] {
    try {
      inner->abort();
    } catch (const std::exception&) {
      // One that is done, or that has no abort of its own.
    }
  };
}

}  // namespace

std::string InnerOpAccount::story() const {
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.3f", elapsed);
  return what + ", elapsed " + seconds + " s]";
}

void InnerOpAccount::succeeded() const {
  if (progress) progress->update([](OpProgress::State& state) { state.end(""); });
}

std::exception_ptr InnerOpAccount::failed(std::exception_ptr error, bool always) const {
  if (!error) return error;
  const auto living = engine.lock();
  const auto end = [this](const std::string& why) {
    if (progress) progress->update([&](OpProgress::State& state) { state.end(why); });
  };
  const auto told = asInnerError(error, story(), [&](const std::string& message, bool fault) -> std::string {
    if (!living) return "";
    if (progress && progress->over()) return living->record().named();
    if (fault || always) return living->fault(message, sequence, progress);
    end(message);
    return living->record().write(message);
  });
  end("the inner backend refused it");  // where it has not ended so: a caller's mistake
  return told;
}

InnerWork::InnerWork(WorkPtr inner, c10d::OpType type, int rank, uint64_t sequence, InnerOpAccount op, Tensors outputs,
                     std::shared_ptr<CallbackThreads> threads, std::function<void()> finish, bool on_host)
    : c10d::Work(rank, type),
      on_host_(on_host),
      outcome_(std::make_shared<Outcome>()),
      inner_(std::move(inner)),
      sequence_(sequence),
      outputs_(std::move(outputs)),
      threads_(std::move(threads)) {
  outcome_->inner = inner_;
  outcome_->op = std::move(op);
  outcome_->once = c10d::isP2POp(type);
  outcome_->finish = std::move(finish);
}

bool InnerWork::isCompleted() {
  if (!inner_->isCompleted()) return false;
  if (!inner_->exception()) outcome_->succeed();
  return true;
}

// Not by the inner Work's own isSuccess(), which WorkNCCL throws from.
bool InnerWork::isSuccess() const {
  if (!inner_->isCompleted() || inner_->exception()) return false;
  outcome_->succeed();
  return true;
}

void InnerWork::synchronize() {
  inner_->synchronize();
  if (outcome_->finish && inner_->isCompleted() && !inner_->exception()) outcome_->succeed();
}

std::exception_ptr InnerWork::exception() const {
  std::exception_ptr error;
  blocking([&] { error = outcome_->op.failed(inner_->exception()); });  // which may end the group, and tell its peers
  return error;
}

std::vector<at::Tensor> InnerWork::result() {
  if (!outputs_.empty()) return outputs_;
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
      // A time-out of the wait's own: the op goes on, and what becomes of it is told when it is known.
      const bool goes_on = !once && !inner->isCompleted();
      failed = goes_on ? asInnerError(std::current_exception(), op.story()) : op.failed(std::current_exception());
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
  blocking([&] { whole = on_host_ && handlesSignals() ? settleBeside(timeout) : outcome_->settle(timeout); });
  return whole;
}

// On a callback thread, while handlers of signals run on this one. Waits for gloo's Works are not to be cut short and
// begun again: some may be waited for once, some throw their error once.
bool InnerWork::settleBeside(std::chrono::milliseconds timeout) {
  constexpr int kGlances = 100;  // of an op that is about to end
  for (int i = 0; i < kGlances; ++i) {
    if (inner_->isCompleted()) return outcome_->settle(timeout);
    std::this_thread::yield();
  }
  const auto settled = std::make_shared<std::promise<bool>>();
  auto whole = settled->get_future();
  threads_->run(
      [outcome = outcome_, settled, timeout] {
        try {
          settled->set_value(outcome->settle(timeout));
        } catch (...) {
          settled->set_exception(std::current_exception());
        }
      },
      abortOf(inner_));
  bool interrupted = false;
  waitWithSignals(
      kNoTimeout,
      [&](std::chrono::milliseconds patience) {
        return interrupted || whole.wait_for(patience) == std::future_status::ready;
      },
      [&](const std::string& name) {
        const std::string why = outcome_->op.what + ": " + name + " in its wait";
        outcome_->op.failed(std::make_exception_ptr(PeerError(why)), /*always=*/true);
        interrupted = true;
        abortOf(inner_)();
      });
  return whole.get();
}

FuturePtr InnerWork::getFuture() {
  std::lock_guard<std::mutex> lock(future_mutex_);
  if (future_) return future_;
  FuturePtr inner;
  try {
    inner = inner_->getFuture();
  } catch (const c10::Error&) {
    // None of its own: one is made below.
  }
  if (inner && !inner->devices().empty()) {
    future_ = inner;  // a device's carries its stream order
  } else if (inner) {
    // Gloo's future of a device's tensors does not wait for its copies to them; its synchronize() does.
    std::vector<c10::Device> devices;
    if (!outputs_.empty() && !outputs_[0].device().is_cpu()) devices.push_back(outputs_[0].device());
    // The caller's error, and the caller's tensors, for which others stood in. Told by a callback thread, for which
    // the process waits before it ends: the inner backend's would be unwound with a Python callback in its hands.
    future_ = c10::make_intrusive<c10::ivalue::Future>(inner->elementType(), devices);
    inner->addCallback([threads = threads_, expected = threads_->expect(), outcome = outcome_, outputs = outputs_,
                        devices, future = future_](c10::ivalue::Future& done) mutable {
      auto value = done.hasError() ? c10::IValue() : outputs.empty() ? done.value() : c10::IValue(std::move(outputs));
      auto error = done.exception_ptr();
      auto tell = [outcome = std::move(outcome), future = std::move(future), value = std::move(value), devices, error] {
        try {
          if (error) std::rethrow_exception(outcome->op.failed(error));
          for (const c10::Device& device : devices) {
            DeviceQueue::occupy(device);
            outcome->inner->synchronize();
          }
          outcome->succeed();
          future->markCompleted(value);
        } catch (...) {
          future->setErrorIfNeeded(std::current_exception());
        }
      };
      threads->run(std::move(tell));
      expected.reset();
    });
  } else {
    future_ = tensorListFuture();
    threads_->run(
        [outcome = outcome_, future = future_, outputs = outputs_] {
          try {
            const bool whole = outcome->settle(kNoTimeout);
            TORCH_CHECK_WITH(DistBackendError, whole, outcome->op.story(), ": it was aborted");
            future->markCompleted(c10::IValue(outputs));
          } catch (...) {
            future->setErrorIfNeeded(std::current_exception());
          }
        },
        abortOf(inner_));
  }
  return future_;
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
