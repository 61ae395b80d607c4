#include "pipeline/sample_memory.h"

#include <string>
#include <utility>

#include "base/error.h"

namespace lowcomm {

SampleMemory::SampleMemory(SlotFormat format)
    : format_(std::move(format)), store_(std::make_unique<RamStore>(format_.slotBytes())) {}

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
  if (version == 0) {
    throw ValueError("memory of samples: sample " + std::to_string(sample) + ": expected version 1 or more, got 0");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  store_->write(sample, version, from);
}

void SampleMemory::forget(uint64_t sample) {
  std::lock_guard<std::mutex> lock(mutex_);
  store_->forget(sample);
}

}  // namespace lowcomm
