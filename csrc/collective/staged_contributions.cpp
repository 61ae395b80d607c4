#include "collective/staged_contributions.h"

#include <cstring>
#include <string>
#include <utility>

#include "collective/staged_sink.h"

namespace lowcomm {

std::string sliceFor(int rank) {
  return "of the slice for rank " + std::to_string(rank);
}

StagedContributions::StagedContributions(OpContext& op, DeviceCodec& device_codec, const RankPlans& slices, DType dtype,
                                         std::vector<const void*> inputs, const Draws& draws)
    : op_(op), device_codec_(device_codec), slices_(slices), dtype_(dtype), inputs_(std::move(inputs)) {
  for (int rank = 0; rank < op.group.size(); ++rank) {
    const MessagePlan& slice = slices.of(rank);
    const auto slot = static_cast<uint64_t>(rank) * slice.layout.segments().size();
    sources_.push_back(rank == op.group.rank()
                           ? nullptr
                           : std::make_unique<StagedSource>(
                                 device_codec, SourceElements{slice, inputs_[rank], draws.slot(slot), sliceFor(rank)}));
  }
}

void StagedContributions::start(size_t k) {
  for (size_t rank = 0; rank < sources_.size(); ++rank) {
    if (sources_[rank] && k < slices_.of(static_cast<int>(rank)).frames.size()) sources_[rank]->start(k);
  }
}

const void* StagedContributions::own(const Run& run) const {
  return static_cast<const std::byte*>(inputs_[op_.group.rank()]) + run.at * itemBytes(dtype_);
}

StagedContributions::FrameTerms StagedContributions::load(size_t k,
                                                          const std::vector<std::span<const std::byte>>& payloads) {
  FrameTerms loaded;
  const auto& frames = slices_.of(op_.group.rank()).frames;
  if (k >= frames.size()) return loaded;  // other slices are longer
  const Frame& frame = frames[k];
  const size_t ranks = payloads.size(), own_rank = static_cast<size_t>(op_.group.rank());
  size_t bytes = 0;
  for (const Run& run : frame.runs)
    bytes += run.last() && run.count > 0 ? (ranks - 1) * run.whole : 0;
  if (bytes > 0) loaded.slot = device_codec_.take(bytes);
  size_t at = 0, to = 0;  // in the frames, in the slot
  for (const Run& run : frame.runs) {
    const bool whole = run.last() && run.count > 0;
    RunTerms sum{&run, std::vector<StagedTerm>(ranks), std::vector<std::span<const std::byte>>(ranks)};
    sum.terms[own_rank].own = own(run);
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (rank == own_rank) continue;
      const auto payload = incoming_.take(run, static_cast<int>(rank), payloads[rank].subspan(at, run.bytes));
      if (!whole) continue;
      op_.attribute(static_cast<int>(rank), [&] { expectPadded(run, dtype_, payload); });
      std::memcpy(loaded.slot->host() + to, payload.data(), payload.size());
      sum.payloads[rank] = {loaded.slot->host() + to, payload.size()};
      sum.terms[rank].payload = loaded.slot->device() + to;
      to += payload.size();
    }
    at += run.bytes;
    if (whole) loaded.runs.push_back(std::move(sum));
  }
  if (loaded.slot) device_codec_.load(*loaded.slot);
  return loaded;
}

void StagedContributions::attribute(const RunTerms& whole) const {
  const Run& run = *whole.run;
  for (size_t rank = 0; rank < whole.payloads.size(); ++rank) {
    if (whole.payloads[rank].empty()) continue;
    std::vector<std::byte> decoded(run.count * itemBytes(dtype_));
    op_.attribute(static_cast<int>(rank),
                  [&] { run.codec->decode(decoded.data(), dtype_, whole.payloads[rank], run.offset, run.count); });
  }
}

}  // namespace lowcomm
