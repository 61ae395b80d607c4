#include "engine/group_ops.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace lowcomm {

std::optional<GroupOps::Refused> GroupOps::add(Entry& entry, std::optional<uint32_t> given) {
  std::lock_guard<std::mutex> lock(mutex_);
  entry.sequence = sequence_ = given.value_or(sequence_ + 1);
  std::optional<Cancellation::Cause> cause;
  if (const auto known = cancelled_.find(entry.sequence); known != cancelled_.end()) {
    cause = known->second.cause;
    forgetPast();
  }
  if (!ended_why_.empty() || stopping_) return Refused{endedNow(entry.op), /*is_over=*/true};
  entry.progress = record_.add(entry.op, entry.sequence);
  if (cause) {
    OpContext context(group_, entry.op, entry.sequence);
    context.progress = entry.progress;
    const std::exception_ptr refused = context.givenUp(*cause);
    context.noteFailure(whatOf(refused));
    return Refused{refused, /*is_over=*/false};
  }
  entry.cancellation = std::make_shared<Cancellation>();
  queue_.push_back(std::move(entry));
  changed_.notify_all();
  return {};
}

void GroupOps::waitForOp() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
}

GroupOps::Next GroupOps::take(Entry& entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (queue_.empty()) return stopping_ ? Next::stop : Next::none;
  entry = std::move(queue_.front());
  queue_.pop_front();
  busy_ = true;
  current_ = entry.cancellation;
  current_sequence_ = entry.sequence;
  return Next::op;
}

void GroupOps::ran() {
  std::lock_guard<std::mutex> lock(mutex_);
  current_ = nullptr;
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

bool GroupOps::enterCancel() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!ended_why_.empty()) return false;
  ++cancelling_;
  return true;
}

void GroupOps::leaveCancel() {
  std::lock_guard<std::mutex> lock(mutex_);
  --cancelling_;
  changed_.notify_all();
}

std::optional<GroupOps::Cancelled> GroupOps::cancel(const OpNotice& notice, std::optional<int> from) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!ended_why_.empty()) return {};
  if (const auto known = cancelled_.find(notice.sequence); known != cancelled_.end()) {
    if (from) --known->second.notices;
    forgetPast();
    return {};
  }
  Cancelled found;
  const auto queued =
      std::find_if(queue_.begin(), queue_.end(), [&](const Entry& entry) { return entry.sequence == notice.sequence; });
  if (queued != queue_.end()) found.cancellation = queued->cancellation;
  if (current_ && current_sequence_ == notice.sequence) found.cancellation = current_;
  const bool is_cancelled = found.cancellation && found.cancellation->given();
  if (!from && (!found.cancellation || is_cancelled)) return {};
  cancelled_[notice.sequence] = {notice.cause, group_.size() - 1 - (from ? 1 : 0)};
  forgetPast();
  if (found.cancellation) found.cancellation->give(notice.cause);
  if (queued != queue_.end() && !from) {
    found.queued = std::move(*queued);
    queue_.erase(queued);
  }
  return found;
}

// With the lock.
void GroupOps::forgetPast() {
  std::erase_if(cancelled_, [&](const auto& op) {
    const bool past = static_cast<int32_t>(op.first - sequence_) <= 0;
    return past && op.second.notices == 0;
  });
}

bool GroupOps::end(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!ended_why_.empty()) return false;
  ended_why_ = why;
  if (current_) current_->endGroup();
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

bool GroupOps::isStopping() {
  std::lock_guard<std::mutex> lock(mutex_);
  return stopping_;
}

bool GroupOps::waitUntilIdle(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, patience, [&] { return queue_.empty() && !busy_ && cancelling_ == 0; });
}

void GroupOps::waitUntilLeft() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return running_inline_ == 0 && cancelling_ == 0; });
}

uint32_t GroupOps::lastSequence() {
  std::lock_guard<std::mutex> lock(mutex_);
  return sequence_;
}

}  // namespace lowcomm
