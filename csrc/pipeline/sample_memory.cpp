#include "pipeline/sample_memory.h"

#include <cstring>
#include <string>

#include "base/error.h"
#include "base/hashes.h"
#include "base/narrow_float.h"

namespace lowcomm {

SampleMemory::SampleMemory(uint64_t elements, DType dtype) : elements_(elements), dtype_(dtype) {
  if (!isCoded(dtype)) {
    throw TypeError(std::string("memory of samples: expected float32, float16 or bfloat16, got ") + dtypeName(dtype));
  }
  if (elements == 0) throw ValueError("memory of samples: expected 1 element a sample or more, got 0");
}

uint32_t SampleMemory::version(uint64_t sample) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto slot = slots_.find(sample);
  return slot == slots_.end() ? 0 : slot->second.version;
}

void SampleMemory::read(uint64_t sample, std::byte* to) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto slot = slots_.find(sample);
  if (slot == slots_.end()) {
    throw ValueError("memory of samples: expected a sample that was seen, got " + std::to_string(sample));
  }
  std::memcpy(to, slot->second.data.get(), slotBytes());
}

void SampleMemory::update(uint64_t sample, uint32_t before, const std::byte* from) {
  std::lock_guard<std::mutex> lock(mutex_);
  Slot& slot = slotOf(sample);
  if (slot.version != before) {
    throw ValueError("memory of samples: sample " + std::to_string(sample) + ": expected version " +
                     std::to_string(before) + ", got " + std::to_string(slot.version));
  }
  std::memcpy(slot.data.get(), from, slotBytes());
  ++slot.version;
}

void SampleMemory::restore(uint64_t sample, uint32_t version, const std::byte* from) {
  std::lock_guard<std::mutex> lock(mutex_);
  Slot& slot = slotOf(sample);
  std::memcpy(slot.data.get(), from, slotBytes());
  slot.version = version;
}

// With the lock.
SampleMemory::Slot& SampleMemory::slotOf(uint64_t sample) {
  Slot& slot = slots_[sample];
  if (!slot.data) slot.data.reset(new std::byte[slotBytes()]);
  return slot;
}

void SampleMemory::forget(uint64_t sample) {
  std::lock_guard<std::mutex> lock(mutex_);
  slots_.erase(sample);
}

std::vector<SlotSummary> SampleMemory::table() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<SlotSummary> table;
  for (const auto& [sample, slot] : slots_)
    table.push_back({sample, slot.version, crc32c(slot.data.get(), slotBytes())});
  return table;
}

size_t SampleMemory::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return slots_.size() * slotBytes();
}

}  // namespace lowcomm
