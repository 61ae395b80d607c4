#include "pipeline/sample_memory.h"

#include <utility>

#include "base/error.h"
#include "messages/p2p_message.h"

namespace lowcomm {

SampleMemory::SampleMemory(SlotFormat format, std::unique_ptr<SlotStore> store, uint64_t max_bytes)
    : format_(std::move(format)), store_(std::move(store)), max_bytes_(max_bytes) {}

SampleMemory::SampleMemory(SlotFormat format, uint64_t max_bytes)
    : SampleMemory(format, std::make_unique<RamStore>(format.slotBytes()), max_bytes) {}

// With the lock.
bool SampleMemory::roomForOne() const {
  return (store_->slots() + admitted_.size()) < max_bytes_ / format_.slotBytes();
}

uint32_t SampleMemory::admit(uint64_t sample) {
  std::lock_guard<std::mutex> lock(mutex_);
  store_->check();
  const uint32_t version = store_->version(sample);
  if (version > 0) return version;
  const auto known = admitted_.find(sample);
  if (known == admitted_.end() && !roomForOne()) return kNotKept;
  ++admitted_[sample];
  return 0;
}

void SampleMemory::release(uint64_t sample) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = admitted_.find(sample);
  if (--known->second == 0) admitted_.erase(known);
}

// With the lock.
void SampleMemory::expectVersion(uint64_t sample, uint32_t version) const {
  const uint32_t got = store_->version(sample);
  if (got == version) return;
  throw ValueError("memory of samples: sample " + std::to_string(sample) + ": expected version " +
                   std::to_string(version) + ", got " + std::to_string(got));
}

void SampleMemory::read(uint64_t sample, uint32_t version, std::byte* to) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (version == 0) {
    throw ValueError("memory of samples: expected a sample that was seen, got " + std::to_string(sample));
  }
  expectVersion(sample, version);
  store_->read(sample, to);
}

void SampleMemory::update(uint64_t sample, uint32_t before, const std::byte* from) {
  std::lock_guard<std::mutex> lock(mutex_);
  expectVersion(sample, before);
  store_->write(sample, before + 1, from);
}

void SampleMemory::restore(uint64_t sample, uint32_t version, const std::byte* from) {
  const std::string name = "memory of samples: sample " + std::to_string(sample) + ": ";
  if (version == 0) throw ValueError(name + "expected version 1 or more, got 0");
  std::lock_guard<std::mutex> lock(mutex_);
  if (store_->version(sample) == 0 && !roomForOne()) {
    throw ValueError(name + "expected at most max_bytes=" + std::to_string(max_bytes_) + ", got a slot more");
  }
  store_->write(sample, version, from);
}

void SampleMemory::forget(uint64_t sample, const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  store_->forget(sample);
  if (!why.empty()) ++counts_.forgotten[why];
}

std::vector<SlotSummary> SampleMemory::table() const {
  std::lock_guard<std::mutex> lock(mutex_);
  store_->recheck();
  return store_->table();
}

void SampleMemory::count(uint32_t version) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++(version == kNotKept ? counts_.overflow : version > 0 ? counts_.seen : counts_.first);
}

MemoryCounts SampleMemory::counts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  MemoryCounts counts = counts_;
  for (const auto& [why, slots] : store_->forgotten())
    counts.forgotten[why] += slots;
  counts.reads = store_->reads();
  return counts;
}

}  // namespace lowcomm
