#include "engine/group_ops.h"

#include <utility>

#include "base/error.h"

namespace lowcomm {

std::exception_ptr GroupOps::add(Entry& entry, std::optional<uint32_t> given) {
  std::lock_guard<std::mutex> lock(mutex_);
  entry.sequence = sequence_ = given.value_or(sequence_ + 1);
  if (!ended_why_.empty() || stopping_) return endedNow(entry.op);
  entry.progress = record_.add(entry.op, entry.sequence);
  queue_.push_back(std::move(entry));
  changed_.notify_all();
  return nullptr;
}

bool GroupOps::take(Entry& entry) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
  if (queue_.empty()) return false;
  entry = std::move(queue_.front());
  queue_.pop_front();
  busy_ = true;
  return true;
}

void GroupOps::finished() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    busy_ = false;
  }
  changed_.notify_all();
}

std::exception_ptr GroupOps::enter(const std::string& op) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) return endedNow(op);
  ++running_inline_;
  return nullptr;
}

void GroupOps::leave() {
  // Notified under the lock: the thread that shuts the group down may destroy it as soon as the count is 0.
  std::lock_guard<std::mutex> lock(mutex_);
  --running_inline_;
  changed_.notify_all();
}

bool GroupOps::end(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!ended_why_.empty()) return false;
  ended_why_ = why;
  return true;
}

void GroupOps::explainEnd(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  ended_why_ = why;
}

std::string GroupOps::endedWhy() {
  std::lock_guard<std::mutex> lock(mutex_);
  return ended_why_;
}

std::exception_ptr GroupOps::ended(const std::string& op) {
  std::lock_guard<std::mutex> lock(mutex_);
  return endedNow(op);
}

std::exception_ptr GroupOps::endedNow(const std::string& op) const {
  const std::string why = ended_why_.empty() ? "it was shut down" : ended_why_;
  return std::make_exception_ptr(PeerError("lowcomm: " + op + " on group " + group_.name +
                                           " of a lost group; destroy it and make a new one. First cause: " + why));
}

void GroupOps::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
}

bool GroupOps::waitUntilIdle(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, patience, [&] { return queue_.empty() && !busy_; });
}

void GroupOps::waitUntilLeft() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return running_inline_ == 0; });
}

uint32_t GroupOps::lastSequence() {
  std::lock_guard<std::mutex> lock(mutex_);
  return sequence_;
}

}  // namespace lowcomm
