#include "pipeline/slot_store.h"

#include <cstring>

#include "base/hashes.h"

namespace lowcomm {

uint32_t RamStore::version(uint64_t sample) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto slot = slots_.find(sample);
  return slot == slots_.end() ? 0 : slot->second.version;
}

void RamStore::read(uint64_t sample, std::byte* to) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::memcpy(to, slots_.at(sample).data.get(), slot_bytes_);
}

void RamStore::write(uint64_t sample, uint32_t version, const std::byte* from) {
  std::lock_guard<std::mutex> lock(mutex_);
  Slot& slot = slots_[sample];
  if (!slot.data) slot.data.reset(new std::byte[slot_bytes_]);
  std::memcpy(slot.data.get(), from, slot_bytes_);
  slot.version = version;
}

void RamStore::forget(uint64_t sample) {
  std::lock_guard<std::mutex> lock(mutex_);
  slots_.erase(sample);
}

std::vector<SlotSummary> RamStore::table() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<SlotSummary> table;
  for (const auto& [sample, slot] : slots_)
    table.push_back({sample, slot.version, crc32c(slot.data.get(), slot_bytes_)});
  return table;
}

uint64_t RamStore::slots() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return slots_.size();
}

}  // namespace lowcomm
