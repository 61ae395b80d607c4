#include "collective/staged.h"

#include <algorithm>
#include <cstring>

#include "codec/float_codec.h"
#include "collective/op_context.h"

namespace lowcomm {
namespace {

bool refusesSome(const CodecSpec& codec) {
  const PlainFamily* plain = plainFamily(codec.id);
  return codec.id != CodecId::none && codec.nonfinite == Nonfinite::error && !(plain && !plain->nonfinite);
}

}  // namespace

// Where a run's elements are, and what slot it has.
ScatterEntry StagedSource::entryOf(const Run& run) const {
  if (elements_.entries) return (*elements_.entries)[run.segment];
  const auto* data = static_cast<const std::byte*>(elements_.data);
  return {.input = data + (run.at - run.offset) * itemBytes(elements_.plan.dtype), .slot = run.segment};
}

const void* StagedSource::elementsOf(const Run& run) const {
  return static_cast<const std::byte*>(entryOf(run).input) + run.offset * itemBytes(elements_.plan.dtype);
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
      const ScatterEntry entry = entryOf(*run);
      const void* x = elementsOf(*run);
      const Draws draws = elements_.draws.slot(entry.slot);
      void* workspace = device_codec_.workspace(*run, dtype);
      device_codec_.kernels().encode(*run, payload, x, dtype, draws, workspace, frame.slot->word());
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
    const ScatterEntry entry = entryOf(*run);
    auto x = device_codec_.toHost(elementsOf(*run), run->count * itemBytes(dtype));
    run->encode({payload, run->whole}, x.data(), dtype, elements_.draws.slot(entry.slot), elements_.of);
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
  const auto& runs = elements_.plan.frames[k].runs;
  size_t begins = 0, to = 0;  // in the slot, in the payload
  for (const Run& run : runs) {
    if (run.part == 0) begins += run.whole;
    // A payload that goes on is the last of its slot.
    const DeviceCodec::SlotPtr& slot = run.part == 0 ? frame.slot : open_;
    const size_t at = (run.part == 0 ? begins : slot->bytes()) - run.whole + run.part;
    if (run.bytes > 0) std::memcpy(payload.data() + to, slot->host() + at, run.bytes);
    to += run.bytes;
    if (run.part > 0 && run.last()) open_.reset();
  }
  if (!runs.empty() && runs.back().part == 0 && !runs.back().last()) open_ = std::move(frame.slot);
}

void expectPadded(const Run& run, DType dtype, std::span<const std::byte> payload) {
  if (run.codec->spec().id == CodecId::none) NoneCodec::elements(dtype, payload, run.count);
}

std::byte* StagedSink::elementsOf(const Run& run) const {
  const size_t item = itemBytes(elements_.plan.dtype);
  if (elements_.entries) return static_cast<std::byte*>((*elements_.entries)[run.segment].output) + run.offset * item;
  return static_cast<std::byte*>(elements_.data) + run.at * item;
}

void StagedSink::take(size_t k, std::span<const std::byte> payload, int sender) {
  const DType dtype = elements_.plan.dtype;
  const Frame& frame = elements_.plan.frames[k];
  FrameInFlight taken{sender, {nullptr, {nullptr}}, {}};
  size_t bytes = 0;
  for (const Run& run : frame.runs) {
    if (!run.last() || run.count == 0) continue;
    taken.runs.push_back(&run);
    bytes += run.whole;
  }
  while (taken_.size() >= kStagedFrames)
    waitForFirst();
  if (bytes > 0) taken.slot = device_codec_.take(bytes);
  op_.attribute(sender, [&] {
    size_t at = 0, to = 0;  // in the payload, in the slot
    for (const Run& run : frame.runs) {
      const auto whole = parts_.take(run, sender, payload.subspan(at, run.bytes));
      at += run.bytes;
      if (!run.last() || run.count == 0) continue;
      expectPadded(run, dtype, whole);
      std::memcpy(taken.slot->host() + to, whole.data(), whole.size());
      to += whole.size();
    }
  });
  if (bytes == 0) return;
  device_codec_.load(*taken.slot);
  const std::byte* there = taken.slot->device();
  for (const Run* run : taken.runs) {
    device_codec_.kernels().decode(*run, elementsOf(*run), dtype, there, device_codec_.workspace(*run, dtype),
                                   taken.slot->word());
    there += run->whole;
  }
  device_codec_.report(*taken.slot);
  taken_.push_back(std::move(taken));
}

void StagedSink::decodeOnHost(const FrameInFlight& taken) {
  const DType dtype = elements_.plan.dtype;
  const std::byte* payload = taken.slot->host();
  op_.attribute(taken.sender, [&] {
    for (const Run* run : taken.runs) {
      std::vector<std::byte> y(run->count * itemBytes(dtype));
      run->codec->decode(y.data(), dtype, {payload, run->whole}, run->offset, run->count);
      device_codec_.toDevice(elementsOf(*run), y);
      payload += run->whole;
    }
  });
}

void StagedSink::waitForFirst() {
  const FrameInFlight taken = std::move(taken_.front());
  taken_.pop_front();
  if (device_codec_.refused(*taken.slot)) decodeOnHost(taken);
}

void StagedSink::wait() {
  Stopwatch watch(op_, Doing::decode);
  while (!taken_.empty())
    waitForFirst();
}

void StagedCheck::start(size_t k) {
  if (k >= plan_.frames.size()) return;
  FrameInFlight begun{{nullptr, {nullptr}}, {}};
  size_t bytes = 0;
  for (const Run& run : plan_.frames[k].runs) {
    if (run.part > 0 || run.count == 0 || !refusesSome(run.codec->spec())) continue;
    begun.runs.push_back(&run);
    bytes = std::max(bytes, run.whole);
  }
  if (!begun.runs.empty()) {
    begun.slot = device_codec_.take(bytes);
    device_codec_.clear(*begun.slot);
    for (const Run* run : begun.runs) {  // one payload over the other
      device_codec_.kernels().encode(*run, begun.slot->device(), data_ + run->at * itemBytes(plan_.dtype), plan_.dtype,
                                     Draws{}, device_codec_.workspace(*run, plan_.dtype), begun.slot->word());
    }
    device_codec_.report(*begun.slot);
  }
  begun_.push_back(std::move(begun));
}

void StagedCheck::finish(size_t k) {
  if (k >= plan_.frames.size()) return;
  const FrameInFlight begun = std::move(begun_.front());
  begun_.pop_front();
  if (!begun.slot || !device_codec_.refused(*begun.slot)) return;
  for (const Run* run : begun.runs) {
    const size_t item = itemBytes(plan_.dtype);
    const auto x = device_codec_.toHost(data_ + run->at * item, run->count * item);
    run->codec->expectTaken(x.data(), plan_.dtype, run->at, run->count, of_);
  }
}

}  // namespace lowcomm
