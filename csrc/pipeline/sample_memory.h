#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pipeline/slot_store.h"

namespace lowcomm {

// Counts of what has happened to the samples of a memory.
struct MemoryCounts {
  uint64_t seen = 0;                          // samples of messages that travelled as changes
  uint64_t first = 0;                         // for the first time, or again after their slot was forgotten
  uint64_t overflow = 0;                      // without a slot, for want of room
  std::map<std::string, uint64_t> forgotten;  // slots, by reason
  ReadCounts reads;                           // of slots in a file
};

// The memory of one side of a channel: m of AQ-SGD (Wang et al., Fine-tuning Language Models over Slow
// Networks using Activation Compression with Guarantees, NeurIPS 2022, section 3). Both sides update it equally; which
// bits it has does not matter as long as both have the same. N samples take N · format().slotBytes() bytes.
// Thread-safe. All calls throw FileError where the store does.
class SampleMemory {
 public:
  // `max_bytes` bounds the bytes of all slots.
  SampleMemory(SlotFormat format, std::unique_ptr<SlotStore> store, uint64_t max_bytes = UINT64_MAX);

  // Slots in the process's memory.
  explicit SampleMemory(SlotFormat format, uint64_t max_bytes = UINT64_MAX);

  const SlotFormat& format() const { return format_; }
  uint64_t maxBytes() const { return max_bytes_; }

  // Updates of a sample; 0 where it has not been seen.
  uint32_t version(uint64_t sample) const { return store_->version(sample); }

  // The next message's samples, whose slots are read behind the caller. Throws nothing: admit() does.
  void readAhead(const std::vector<uint64_t>& samples) { store_->readAhead(samples); }

  // The version of a sample that has a slot; 0 for one that gets a slot, and whose room is held from now on until
  // release(); kNotKept where there is no room. Two sides of equal bounds that ask in the same order get equal answers.
  uint32_t admit(uint64_t sample);
  void release(uint64_t sample);

  // Copies the slot of version `version`. ValueError where the sample has another one, or none.
  void read(uint64_t sample, uint32_t version, std::byte* to) const;

  // Overwrites a slot of version `before` (0: creates the slot), and raises its version. ValueError if the slot has
  // another version because it was updated meanwhile.
  void update(uint64_t sample, uint32_t before, const std::byte* from);

  // Overwrites or creates a slot with one of a checkpoint. ValueError for version 0, or without room.
  void restore(uint64_t sample, uint32_t version, const std::byte* from);

  // The sample has not been seen from now on; counted with its reason, unless that is empty.
  void forget(uint64_t sample, const std::string& why = "");

  // All slots, by sample, without those that are damaged.
  std::vector<SlotSummary> table() const;

  // Bytes of all slots.
  uint64_t bytes() const { return store_->slots() * format_.slotBytes(); }

  // Counts samples of a message that is through: seen or first by the version that they had, or kNotKept.
  void count(uint32_t version);
  MemoryCounts counts() const;

  // As SlotStore has them.
  void flush() { store_->flush(); }
  void close() { store_->close(); }

 private:
  void expectVersion(uint64_t sample, uint32_t version) const;
  bool roomForOne() const;

  const SlotFormat format_;
  const std::unique_ptr<SlotStore> store_;
  const uint64_t max_bytes_;
  mutable std::mutex mutex_;               // of what follows, and between the check of a version and its use
  std::map<uint64_t, uint32_t> admitted_;  // samples without a slot for which one is held, and for how many messages
  MemoryCounts counts_;
};

}  // namespace lowcomm
