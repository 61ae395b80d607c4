#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"
#include "collective/context.h"
#include "collective/device_codec.h"
#include "collective/plan.h"
#include "collective/staged_source.h"

namespace lowcomm {

// What ends a NonFiniteError: "of the slice for rank 2".
std::string sliceFor(int rank);

// Contributions (collective/contributions.h) whose elements a device codec has: the same frames, and the payloads that
// come are handed on where the device has them. Without residuals, premultiplication and codecs that saturate: own
// elements would have to be changed before they are summed.
class StagedContributions {
 public:
  // As Contributions; `inputs` are on the device.
  StagedContributions(OpContext& op, DeviceCodec& device_codec, const RankPlans& slices, DType dtype,
                      std::vector<const void*> inputs, const Draws& draws);

  // What of Phase is theirs. Nobody looks at this rank's own elements.
  void start(size_t k);
  void encode(size_t k, int peer, std::span<std::byte> payload) { sources_[peer]->encode(k, payload); }

  // A run of this rank's slice with everybody's part of its sum, in order of ranks.
  struct RunTerms {
    const Run* run;
    std::vector<StagedTerm> terms;
    std::vector<std::span<const std::byte>> payloads;  // on the host; this rank's own is empty
  };
  struct FrameTerms {
    DeviceCodec::SlotPtr slot{nullptr, {nullptr}};
    std::vector<RunTerms> runs;
  };

  // The runs that are whole with frame k, their payloads on the way to the device. No slot where there are none.
  FrameTerms load(size_t k, const std::vector<std::span<const std::byte>>& payloads);

  // This rank's elements of a run of its own slice.
  const void* own(const Run& run) const;

  // Decodes the payloads on the host: blames the rank whose does not.
  void attribute(const RunTerms& whole) const;

 private:
  OpContext& op_;
  DeviceCodec& device_codec_;
  const RankPlans& slices_;
  const DType dtype_;
  const std::vector<const void*> inputs_;
  std::vector<std::unique_ptr<StagedSource>> sources_;  // by rank; null for this one
  IncomingParts incoming_;
};

}  // namespace lowcomm
