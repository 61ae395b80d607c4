#include "collective/staged_source.h"

#include <cstring>
#include <utility>

namespace lowcomm {

const void* StagedSource::elementsOf(const Run& run) const {
  return static_cast<const std::byte*>(elements_.data) + run.at * itemBytes(elements_.plan.dtype);
}

void StagedSource::start(size_t k) {
  FrameInFlight frame{k, {nullptr, {nullptr}}, {}};
  size_t bytes = 0;
  for (const Run& run : elements_.plan.frames[k].runs) {
    if (run.part > 0) continue;
    frame.runs.push_back(&run);
    bytes += run.whole;
  }
  if (bytes > 0) {
    const DType dtype = elements_.plan.dtype;
    frame.slot = device_codec_.take(bytes);
    device_codec_.clear(*frame.slot);
    std::byte* payload = frame.slot->device();
    for (const Run* run : frame.runs) {
      device_codec_.kernels().encode(*run, payload, elementsOf(*run), dtype, elements_.draws.slot(run->segment),
                                     device_codec_.workspace(*run, dtype), frame.slot->word());
      payload += run->whole;
    }
    device_codec_.fetch(*frame.slot);
  }
  started_.push_back(std::move(frame));
}

// The whole frame, run by run and in order, so that the first error is the one that a tensor in host memory has.
void StagedSource::encodeOnHost(FrameInFlight& frame) {
  const DType dtype = elements_.plan.dtype;
  std::byte* payload = frame.slot->host();
  for (const Run* run : frame.runs) {
    const auto x = device_codec_.toHost(elementsOf(*run), run->count * itemBytes(dtype));
    run->encode({payload, run->whole}, x.data(), dtype, elements_.draws.slot(run->segment), elements_.of);
    payload += run->whole;
  }
  device_codec_.load(*frame.slot);  // what is decoded from
}

void StagedSource::settle(FrameInFlight& frame) {
  if (!frame.slot) return;
  if (device_codec_.refused(*frame.slot)) encodeOnHost(frame);
  if (!elements_.decoded) return;
  const DType dtype = elements_.plan.dtype;
  const std::byte* payload = frame.slot->device();
  for (const Run* run : frame.runs) {
    auto* y = static_cast<std::byte*>(elements_.decoded) + run->at * itemBytes(dtype);
    device_codec_.kernels().decode(*run, y, dtype, payload, device_codec_.workspace(*run, dtype), frame.slot->word());
    payload += run->whole;
  }
}

void StagedSource::encode(size_t k, std::span<std::byte> payload) {
  if (started_.empty()) start(k);
  FrameInFlight frame = std::move(started_.front());
  started_.pop_front();
  settle(frame);
  size_t begins = 0;  // in the slot
  elements_.plan.frames[k].eachRun(payload, [&](const Run& run, std::span<std::byte> part) {
    if (run.part == 0) begins += run.whole;
    // A payload that goes on is the last of its slot.
    const DeviceCodec::SlotPtr& slot = run.part == 0 ? frame.slot : open_;
    const size_t at = (run.part == 0 ? begins : slot->bytes()) - run.whole + run.part;
    if (!part.empty()) std::memcpy(part.data(), slot->host() + at, part.size());
    if (run.part > 0 && run.last()) open_.reset();
  });
  const auto& runs = elements_.plan.frames[k].runs;
  if (!runs.empty() && runs.back().part == 0 && !runs.back().last()) open_ = std::move(frame.slot);
}

}  // namespace lowcomm
