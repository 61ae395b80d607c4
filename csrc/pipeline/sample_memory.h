#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/dtype.h"

namespace lowcomm {

// A sample's slot in a few words, by which two sides find out whether theirs are equal.
struct SlotSummary {
  uint64_t sample = 0;
  uint32_t version = 0;  // updates since the sample was first seen, the first included
  uint32_t digest = 0;   // CRC-32C of the slot's bytes
  bool operator==(const SlotSummary&) const = default;
};

// The memory of one side of a channel: m of AQ-SGD (Wang et al., Fine-tuning Language Models over Slow
// Networks using Activation Compression with Guarantees, NeurIPS 2022, section 3). Both sides update it alike; which
// bits it has does not matter as long as both have the same. A slot holds `elements` numbers of `dtype`: for N samples
// that is N · elements · 4 or 2 bytes. Thread-safe.
class SampleMemory {
 public:
  // TypeError unless `dtype` is float32, float16 or bfloat16; ValueError for 0 elements.
  SampleMemory(uint64_t elements, DType dtype);

  uint64_t elements() const { return elements_; }
  DType dtype() const { return dtype_; }
  size_t slotBytes() const { return elements_ * itemBytes(dtype_); }

  // Updates of a sample; 0 where it has not been seen.
  uint32_t version(uint64_t sample) const;

  // Copies a slot of slotBytes(). ValueError where the sample has not been seen.
  void read(uint64_t sample, std::byte* to) const;

  // Overwrites a slot of version `before`, made where that is 0, and raises its version. ValueError where the slot has
  // another one: somebody else has updated it meanwhile.
  void update(uint64_t sample, uint32_t before, const std::byte* from);

  // Overwrites a slot, made where there is none, with one of a checkpoint.
  void restore(uint64_t sample, uint32_t version, const std::byte* from);

  // The sample has not been seen from now on.
  void forget(uint64_t sample);

  // All slots, by sample.
  std::vector<SlotSummary> table() const;

  // Bytes of all slots.
  size_t bytes() const;

 private:
  struct Slot {
    uint32_t version = 0;
    std::unique_ptr<std::byte[]> data;
  };
  Slot& slotOf(uint64_t sample);

  const uint64_t elements_;
  const DType dtype_;
  mutable std::mutex mutex_;
  std::map<uint64_t, Slot> slots_;
};

}  // namespace lowcomm
