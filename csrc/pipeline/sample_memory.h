#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "pipeline/slot_format.h"
#include "pipeline/slot_store.h"

namespace lowcomm {

// The memory of one side of a channel: m of AQ-SGD (Wang et al., Fine-tuning Language Models over Slow
// Networks using Activation Compression with Guarantees, NeurIPS 2022, section 3). Both sides update it equally; which
// bits it has does not matter as long as both have the same. N samples take N · format().slotBytes() bytes.
// Thread-safe.
class SampleMemory {
 public:
  // Slots in the process's memory.
  explicit SampleMemory(SlotFormat format);

  const SlotFormat& format() const { return format_; }

  // Updates of a sample; 0 where it has not been seen.
  uint32_t version(uint64_t sample) const { return store_->version(sample); }

  // Copies the slot of version `version`. ValueError where the sample has another one, or none.
  void read(uint64_t sample, uint32_t version, std::byte* to) const;

  // Overwrites a slot of version `before`, made where that is 0, and raises its version. ValueError where the slot has
  // another one: somebody else has updated it meanwhile.
  void update(uint64_t sample, uint32_t before, const std::byte* from);

  // Overwrites a slot, made where there is none, with one of a checkpoint. ValueError for version 0.
  void restore(uint64_t sample, uint32_t version, const std::byte* from);

  // The sample has not been seen from now on.
  void forget(uint64_t sample);

  // All slots, by sample.
  std::vector<SlotSummary> table() const { return store_->table(); }

  // Bytes of all slots.
  uint64_t bytes() const { return store_->slots() * format_.slotBytes(); }

 private:
  void expectVersion(uint64_t sample, uint32_t version) const;

  const SlotFormat format_;
  const std::unique_ptr<SlotStore> store_;
  mutable std::mutex mutex_;  // between the check of a version and what follows it
};

}  // namespace lowcomm
