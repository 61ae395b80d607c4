#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace lowcomm {

// A sample's slot in a few words, by which two sides find out whether theirs are equal.
struct SlotSummary {
  uint64_t sample = 0;
  uint32_t version = 0;  // updates since the sample was first seen, the first included
  uint32_t digest = 0;   // CRC-32C of the slot's bytes
  bool operator==(const SlotSummary&) const = default;
};

// Slots that were there when they were read, and slots that were fetched then.
struct ReadCounts {
  uint64_t ahead = 0;
  uint64_t late = 0;
};

// Where slots are: bytes of one size by the number of their sample. Thread-safe.
class SlotStore {
 public:
  virtual ~SlotStore() = default;

  // Updates of a sample; 0 where it has no slot.
  virtual uint32_t version(uint64_t sample) const = 0;

  // Copies the slot of a sample, which has one. FileError where that cannot be read, or is not what was written: such a
  // slot is forgotten.
  virtual void read(uint64_t sample, std::byte* to) = 0;

  // Writes the slot of a sample, made where there is none; `version` is 1 or more. FileError where that fails: the
  // sample then has none.
  virtual void write(uint64_t sample, uint32_t version, const std::byte* from) = 0;

  // The sample has no slot from now on.
  virtual void forget(uint64_t sample) = 0;

  // All slots, by sample.
  virtual std::vector<SlotSummary> table() const = 0;

  // Number of slots.
  virtual uint64_t slots() const = 0;

  // Slots that the store itself had to forget, by reason.
  virtual std::map<std::string, uint64_t> forgotten() const { return {}; }

  // The slots of these samples are read next. Samples without one are left out; an error is check()'s.
  virtual void readAhead(const std::vector<uint64_t>&) {}
  virtual ReadCounts reads() const { return {}; }

  // Where a slot was found damaged, reads all others again, and forgets those that are: a file that somebody has cut is
  // told once, and not for each sample. FileError.
  virtual void recheck() {}

  // Throws what has failed behind the caller since it was last asked. FileError.
  virtual void check() {}

  // Returns when all that was written is on its medium. FileError.
  virtual void flush() {}

  // Lets the medium go, after which every call throws ValueError. Idempotent.
  virtual void close() {}
};

// Slots in the process's memory.
class RamStore final : public SlotStore {
 public:
  explicit RamStore(size_t slot_bytes) : slot_bytes_(slot_bytes) {}

  uint32_t version(uint64_t sample) const override;
  void read(uint64_t sample, std::byte* to) override;
  void write(uint64_t sample, uint32_t version, const std::byte* from) override;
  void forget(uint64_t sample) override;
  std::vector<SlotSummary> table() const override;
  uint64_t slots() const override;

 private:
  struct Slot {
    uint32_t version = 0;
    std::unique_ptr<std::byte[]> data;
  };

  const size_t slot_bytes_;
  mutable std::mutex mutex_;
  std::map<uint64_t, Slot> slots_;
};

}  // namespace lowcomm
