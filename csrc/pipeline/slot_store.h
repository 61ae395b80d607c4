#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"

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

  // Writes the slot of a sample, which it creates if it is missing; `version` is 1 or more. FileError if that fails:
  // the sample then has no slot.
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

  // After one slot was found damaged, reads all others again, and forgets the damaged ones: a truncated file is
  // reported once, and not for each sample. FileError.
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

// How a slot holds one sample's elements: in a float type, or as the payload of a codec. A coded slot is read and
// written as float32, for AQ-SGD's memory of few bits (Wang et al., Fine-tuning Language Models over Slow Networks
// using Activation Compression with Guarantees, NeurIPS 2022, section 3.1). Thread-safe.
class SlotFormat {
 public:
  // TypeError unless `dtype` is float32, float16 or bfloat16; ValueError for 0 elements.
  SlotFormat(uint64_t elements, DType dtype);

  // ValueError for 0 elements, for a codec that does not take so many, and for `none` and codecs with a level table.
  SlotFormat(uint64_t elements, const CodecSpec& codec);

  // The same from a user's text: "fp32", "fp16" or "bf16", or a codec. `channels` is the last dimension of the tensor,
  // `unit` the elements of its units; 0: none.
  static SlotFormat parse(const std::string& text, uint64_t elements, uint64_t channels, uint64_t unit = 0);

  uint64_t elements() const { return elements_; }
  size_t slotBytes() const { return slot_bytes_; }

  // The part of parse() that depends on the text alone.
  static void check(const std::string& text);

  // The dtype's name, or the codec's text: two sides with equal names hold equal bits after equal messages.
  std::string name() const;

  // The unit in a name; 0 without one.
  static uint64_t unitOf(const std::string& name);

  // Whether slots hold codes. Elements are then worked on as float32, else in the slot itself.
  bool coded() const { return codec_ != nullptr; }
  DType dtype() const { return dtype_; }

  // Coded slots only: all elements of one. ValueError for bytes that no encoder has written.
  void decode(const std::byte* slot, float* elements) const;

  // The reverse. The draws of a stochastic codec are functions of `sample` and `version` alone, so that both sides of a
  // channel have them in common. `elements` is scratch afterwards: a number that is not finite becomes 0, and one that
  // the codec refuses for its size is held to the largest that it takes.
  void encode(float* elements, std::byte* slot, uint64_t sample, uint32_t version) const;

 private:
  uint64_t elements_;
  DType dtype_;
  std::shared_ptr<const Codec> codec_;  // null: a float type
  size_t slot_bytes_;
};

}  // namespace lowcomm
