#include "pipeline/buffered_store.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace lowcomm {
namespace {

constexpr std::chrono::seconds kDeadline{60};
constexpr uint64_t kRounds = 2;  // calls of want() whose slots are kept: of this batch and of the next

}  // namespace

void SlotsAhead::want(const std::vector<uint64_t>& samples) {
  ++round_;
  std::erase_if(wanted_, [&](const auto& entry) { return entry.second.round + kRounds <= round_; });
  for (uint64_t sample : samples) {
    const auto [entry, fresh] = wanted_.try_emplace(sample);
    entry->second.round = round_;
    ++entry->second.wishes;
    if (fresh) to_read_.push_back(sample);
  }
}

SlotsAhead::Bytes SlotsAhead::take(uint64_t sample) {
  const auto wanted = wanted_.find(sample);
  if (wanted == wanted_.end()) return nullptr;
  const Bytes bytes = wanted->second.bytes;
  if (--wanted->second.wishes == 0) wanted_.erase(wanted);
  return bytes;
}

uint64_t SlotsAhead::next() {
  const uint64_t sample = to_read_.front();
  to_read_.pop_front();
  return sample;
}

bool SlotsAhead::lacks(uint64_t sample) const {
  const auto wanted = wanted_.find(sample);
  return wanted != wanted_.end() && !wanted->second.bytes;
}

void SlotsAhead::keep(uint64_t sample, const Bytes& bytes) {
  if (const auto wanted = wanted_.find(sample); wanted != wanted_.end()) wanted->second.bytes = bytes;
}

void SlotsAhead::forgetIf(const std::function<bool(uint64_t sample)>& gone) {
  std::erase_if(wanted_, [&](const auto& entry) { return gone(entry.first); });
}

BufferedStore::BufferedStore(std::unique_ptr<SlotStore> store, size_t slot_bytes, size_t most_waiting, std::string path)
    : store_(std::move(store)),
      slot_bytes_(slot_bytes),
      most_waiting_(most_waiting),
      path_(std::move(path)),
      process_(::getpid()),
      slots_(store_->slots()),
      thread_([this] { work(); }) {}

BufferedStore::~BufferedStore() {
  if (::getpid() != process_) {  // a fork, which has no such thread, and no part in the file
    thread_.detach();
    static_cast<void>(changed_.release());  // its destructor would wait for the thread
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
    ahead_.stop();
  }
  changed_->notify_all();
  thread_.join();
}

// The caller.

uint32_t BufferedStore::version(uint64_t sample) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return versionOf(sample);
}

// With the lock.
uint32_t BufferedStore::versionOf(uint64_t sample) const {
  const auto write = writes_.find(sample);
  return write == writes_.end() ? store_->version(sample) : write->second.version;
}

void BufferedStore::read(uint64_t sample, std::byte* to) {
  Lock lock(mutex_);
  await(lock, "read a slot of", [&] { return !(working_ && sample_ == sample) || writes_.contains(sample); });
  Bytes bytes = ahead_.take(sample);
  if (const auto write = writes_.find(sample); write != writes_.end()) bytes = write->second.bytes;
  ++(bytes ? reads_.ahead : reads_.late);
  lock.unlock();
  if (bytes) {
    std::memcpy(to, bytes->data(), slot_bytes_);
    return;
  }
  try {
    store_->read(sample, to);
  } catch (...) {
    lock.lock();
    if (versionOf(sample) == 0) --slots_;
    throw;
  }
}

void BufferedStore::write(uint64_t sample, uint32_t version, const std::byte* from) {
  const auto bytes = std::make_shared<std::vector<std::byte>>(from, from + slot_bytes_);
  Lock lock(mutex_);
  await(lock, "write a slot of", [&] { return to_write_.size() < most_waiting_; });
  if (versionOf(sample) == 0) ++slots_;
  writes_[sample] = {version, bytes};
  ahead_.outdate(sample);
  to_write_.push_back(sample);
  changed_->notify_all();
}

void BufferedStore::forget(uint64_t sample) {
  Lock lock(mutex_);
  await(lock, "forget a slot of", [&] { return !writes_.contains(sample) && !(working_ && sample_ == sample); });
  ahead_.forget(sample);
  if (store_->version(sample) > 0) --slots_;
  store_->forget(sample);
}

std::vector<SlotSummary> BufferedStore::table() const {
  Lock lock(mutex_);
  drain(lock);
  return store_->table();
}

uint64_t BufferedStore::slots() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return slots_;
}

std::map<std::string, uint64_t> BufferedStore::forgotten() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::map<std::string, uint64_t> forgotten = store_->forgotten();
  if (not_written_ > 0) forgotten["not_written"] += not_written_;
  return forgotten;
}

void BufferedStore::readAhead(const std::vector<uint64_t>& samples) {
  std::lock_guard<std::mutex> lock(mutex_);
  ahead_.want(samples);
  changed_->notify_all();
}

ReadCounts BufferedStore::reads() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return reads_;
}

void BufferedStore::recheck() {
  Lock lock(mutex_);
  drain(lock);
  store_->recheck();
  slots_ = store_->slots();
  ahead_.forgetIf([&](uint64_t sample) { return store_->version(sample) == 0; });
}

void BufferedStore::check() {
  std::lock_guard<std::mutex> lock(mutex_);
  throwFailure();
}

void BufferedStore::flush() {
  {
    Lock lock(mutex_);
    drain(lock);
    throwFailure();
  }
  store_->flush();
}

void BufferedStore::close() {
  Lock lock(mutex_);
  drain(lock);
  store_->close();
  throwFailure();
}

// With the lock.
void BufferedStore::throwFailure() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void BufferedStore::drain(Lock& lock) const {
  await(lock, "write all slots of", [&] { return to_write_.empty() && !working_; });
}

// Waits with the lock until done(), for as long as slots are read and written.
template <class Done>
void BufferedStore::await(Lock& lock, const char* doing, Done done) const {
  while (!done()) {
    const uint64_t before = done_;
    if (changed_->wait_for(lock, kDeadline, [&] { return done() || done_ != before; })) continue;
    throw FileError("slot file: could not " + std::string(doing) + " '" + path_ +
                        "': expected its disk to read or write within " + std::to_string(kDeadline.count()) +
                        " s, got nothing; " + std::to_string(to_write_.size()) + " slots wait to be written",
                    path_, ETIMEDOUT);
  }
}

// The thread.

void BufferedStore::work() {
  Lock lock(mutex_);
  for (;;) {
    changed_->wait(lock, [&] { return ending_ || ahead_.hasNext() || !to_write_.empty(); });
    if (ahead_.hasNext()) {
      readNext(lock);
    } else if (!to_write_.empty()) {
      writeNext(lock);
    } else {
      return;
    }
    ++done_;
    changed_->notify_all();
  }
}

void BufferedStore::readNext(Lock& lock) {
  const uint64_t sample = ahead_.next();
  // A slot that waits to be written is kept when it is.
  if (!ahead_.lacks(sample) || writes_.contains(sample) || store_->version(sample) == 0) return;
  working_ = true;
  sample_ = sample;
  lock.unlock();
  Bytes bytes;
  std::exception_ptr failure;
  try {
    bytes = std::make_shared<std::vector<std::byte>>(slot_bytes_);
    store_->read(sample, bytes->data());
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  working_ = false;
  if (!failure) return keepAhead(sample, bytes);
  if (!failure_) failure_ = failure;
  if (versionOf(sample) == 0) --slots_;
}

void BufferedStore::writeNext(Lock& lock) {
  const uint64_t sample = to_write_.front();
  if (!writes_.contains(sample)) return to_write_.pop_front();  // the turn before has written the later one
  const Write write = writes_.at(sample);
  working_ = true;
  sample_ = sample;
  lock.unlock();
  std::exception_ptr failure;
  try {
    store_->write(sample, write.version, write.bytes->data());
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  working_ = false;
  to_write_.pop_front();
  const auto last = writes_.find(sample);
  const bool overtaken = last->second.bytes != write.bytes;
  if (failure && !failure_) failure_ = failure;
  if (overtaken) return;  // a later write of the sample waits
  writes_.erase(last);
  if (!failure) return keepAhead(sample, write.bytes);
  ++not_written_;
  --slots_;
}

// Keeps a sample that is needed again soon.
void BufferedStore::keepAhead(uint64_t sample, const Bytes& bytes) {
  if (!writes_.contains(sample)) ahead_.keep(sample, bytes);
}

}  // namespace lowcomm
