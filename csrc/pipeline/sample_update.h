#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "codec/fused.h"
#include "codec/spec.h"
#include "messages/p2p_message.h"
#include "pipeline/sample_memory.h"
#include "wire/layout.h"

namespace lowcomm {

// How a channel encodes its samples: `seen` what changed since a sample's last visit, `first` the sample itself at its
// first one, `overflow` the sample itself where the memory has no room for it, as `first` does without. Where one has
// axis=channel it has its number of channels too.
struct DeltaCodecs {
  CodecSpec seen;
  CodecSpec first;
  std::optional<CodecSpec> overflow = std::nullopt;
};

// One message's samples as a transaction on the memory: it works on copies of their slots, and writes them when it is
// committed. A message that fails leaves the memory as it was. Not thread-safe.
//
//   SampleUpdate update(memory, samples, codecs);   versions, and with them the message's layout
//   update.load();                                  slots
//   for each run, in order: read and write update.state(run.at, run.count), then update.finish(run.at, run.count)
//   update.commit();
class SampleUpdate {
 public:
  SampleUpdate(std::shared_ptr<SampleMemory> memory, std::vector<uint64_t> samples, const DeltaCodecs& codecs);
  ~SampleUpdate();

  // Samples of one kind that follow each other are one segment.
  const Layout& layout() const { return layout_; }
  std::vector<SampleKey> keys() const;
  std::string memoryName() const { return memory_->format().name(); }

  // Reads the slots of samples that were seen. ValueError where a slot has another version than when this was made.
  void load();

  // Whether the message's element `at` is of a sample that was seen before.
  bool seen(uint64_t at) const { return hasSlot(at / elements()); }

  // m of `count` elements from `at` on; undefined where not seen. Before finish() of them. What is written for a sample
  // that is not kept goes nowhere.
  State state(uint64_t at, uint64_t count);

  // The state of these elements is that after the message. Coded slots are encoded with their last elements.
  void finish(uint64_t at, uint64_t count);

  // The new slots, of a message that is through.
  void commit();

 private:
  void release();

  bool hasSlot(size_t i) const { return versions_[i] > 0 && versions_[i] != kNotKept; }
  uint64_t elements() const { return memory_->format().elements(); }
  std::byte* slot(size_t i) { return slots_.data() + i * memory_->format().slotBytes(); }

  const std::shared_ptr<SampleMemory> memory_;
  const std::vector<uint64_t> samples_;
  std::vector<uint32_t> versions_;  // of samples that were admitted: fewer while this is made
  Layout layout_;
  std::vector<std::byte> slots_;  // copies, by sample of the message
  std::vector<float> decoded_;    // of coded slots: m of all samples, from state() to the last finish()
  size_t decoded_samples_ = 0;
};

// Writes elements that arrive for the first time to a memory: their decoded values, rounded once to its type, a number
// beyond the largest of a 16-bit type held to it and one that is not finite 0. `decoded` is scratch afterwards.
void remember(State after, float* decoded, uint64_t count);

// Widens `count` elements of one of the three float types to float32.
void toFloats(Elements from, float* to, uint64_t count);

}  // namespace lowcomm
