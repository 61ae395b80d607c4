#include "collective/staged_sink.h"

#include <cstring>
#include <utility>

#include "codec/none.h"

namespace lowcomm {

void expectPadded(const Run& run, DType dtype, std::span<const std::byte> payload) {
  if (run.codec->spec().id == CodecId::none) NoneCodec::elements(dtype, payload, run.count);
}

std::byte* StagedSink::elementsOf(const Run& run) const {
  return static_cast<std::byte*>(elements_.data) + run.at * itemBytes(elements_.plan.dtype);
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
  size_t at = 0;
  op_.attribute(sender, [&] {
    frame.eachRun(payload, [&](const Run& run, std::span<const std::byte> part) {
      const auto whole = parts_.take(run, sender, part);
      if (!run.last() || run.count == 0) return;
      expectPadded(run, dtype, whole);
      std::memcpy(taken.slot->host() + at, whole.data(), whole.size());
      at += whole.size();
    });
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

}  // namespace lowcomm
