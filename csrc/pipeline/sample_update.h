#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "codec/fused.h"
#include "codec/spec.h"
#include "collective/p2p_message.h"
#include "pipeline/sample_memory.h"
#include "wire/layout.h"

namespace lowcomm {

// How a channel encodes its samples: `seen` what changed since a sample's last visit, `first` the sample itself at its
// first one. Where one has axis=channel it has its number of channels too.
struct DeltaCodecs {
  CodecSpec seen;
  CodecSpec first;
};

// One message's samples as a transaction on the memory: it reads slots when it is made, works on copies, and writes
// them when it is committed. A message that fails leaves the memory as it was. Not thread-safe.
class SampleUpdate {
 public:
  SampleUpdate(std::shared_ptr<SampleMemory> memory, std::vector<uint64_t> samples, const DeltaCodecs& codecs);

  // Samples of one kind that follow each other are one segment.
  const Layout& layout() const { return layout_; }
  std::vector<SampleKey> keys() const;
  DType memoryType() const { return memory_->dtype(); }

  // Whether the message's element `at` is of a sample that was seen before.
  bool seen(uint64_t at) const { return versions_[at / memory_->elements()] > 0; }

  // The memory's elements from `at` on, before and after the message. Before is undefined where not seen.
  Elements before(uint64_t at) const { return {before_.data() + at * itemBytes(memory_->dtype()), memory_->dtype()}; }
  State after(uint64_t at) { return {after_.data() + at * itemBytes(memory_->dtype()), memory_->dtype()}; }

  // The new slots, of a message that is through.
  void commit();

 private:
  const std::shared_ptr<SampleMemory> memory_;
  const std::vector<uint64_t> samples_;
  std::vector<uint32_t> versions_;
  std::vector<std::byte> before_, after_;
  Layout layout_;
};

// Writes elements that arrive for the first time to a memory: their decoded values, rounded once to its type, a number
// beyond the largest of a 16-bit type held to it and one that is not finite 0. `decoded` is scratch afterwards.
void remember(State after, float* decoded, uint64_t count);

// Widens `count` elements of one of the three float types to float32.
void toFloats(Elements from, float* to, uint64_t count);

}  // namespace lowcomm
