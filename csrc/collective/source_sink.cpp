#include "collective/source_sink.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "collective/staged.h"
#include "kernels/reduce.h"

namespace lowcomm {

std::optional<Window> windowOf(const Loss& loss, size_t k, size_t frames, const Run& run, uint32_t step) {
  if (loss.taken() || run.codec->spec().id == CodecId::none || k != step % frames) return std::nullopt;
  const uint64_t unit = run.codec->spec().unit, granule = unit > 0 ? unit : run.codec->granularity();
  if (granule == Codec::kUncut || granule >= run.count) {
    if (run.count == 0 || run.count > kMostSampled) return std::nullopt;
    return Window{0, run.count};
  }
  if (granule > kMostSampled) return std::nullopt;
  const uint64_t length = std::min(std::max(kSampled / granule, uint64_t{1}) * granule, run.count);
  return Window{step / frames % (run.count / length) * length, length};
}

void addLoss(Loss& loss, const float* x, const float* decoded, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    const double value = x[i], lost = static_cast<double>(decoded[i]) - value;
    if (!std::isfinite(value) || !std::isfinite(lost)) continue;
    loss.whole += value * value;
    loss.lost += lost * lost;
  }
}

void addLossOf(Loss& loss, const Run& run, const Window& window, const std::vector<float>& x, const Draws& draws) {
  // One buffer per thread, which encodes op after op: allocating memory would cost more than the sample.
  thread_local std::vector<std::byte> payload;
  thread_local std::vector<float> decoded;
  const uint64_t at = run.codec->spec().unit > 0 ? 0 : run.offset + window.first;  // of units a window is a tensor
  payload.resize(run.codec->encodedBytes(window.count, DType::float32));
  decoded.resize(window.count);
  run.codec->encode(payload, x.data(), DType::float32, at, window.count, draws);
  run.codec->decode(decoded.data(), DType::float32, payload, at, window.count);
  addLoss(loss, x.data(), decoded.data(), window.count);
}

void sample(Loss& loss, size_t k, size_t frames, const Run& run, const void* src, DType dtype, const Draws& draws) {
  const auto window = windowOf(loss, k, frames, run, draws.step);
  if (!window) return;
  thread_local std::vector<float> x;
  x.resize(window->count);
  reduceAssign(x.data(), static_cast<const std::byte*>(src) + window->first * itemBytes(dtype), dtype, window->count);
  addLossOf(loss, run, *window, x, draws);
}

namespace {

class HostSource final : public Source {
 public:
  HostSource(OpContext& op, SourceElements elements) : op_(op), elements_(std::move(elements)) {}

  void encode(size_t k, std::span<std::byte> payload) override {
    const MessagePlan& plan = elements_.plan;
    const auto* data = static_cast<const std::byte*>(elements_.data);
    size_t at = 0;
    for (const Run& run : plan.frames[k].runs) {
      parts_.write(payload.subspan(at, run.bytes), run, 0, [&](std::span<std::byte> whole) {
        const std::byte* x = data + run.at * itemBytes(plan.dtype);
        const Draws draws = elements_.draws.slot(run.segment);
        run.encode(whole, x, plan.dtype, draws, elements_.of);
        sample(op_.counters.loss, k, plan.frames.size(), run, x, plan.dtype, draws);
      });
      at += run.bytes;
    }
  }

 private:
  OpContext& op_;
  const SourceElements elements_;
  OutgoingParts parts_;
};

}  // namespace

std::unique_ptr<Source> makeSource(OpContext& op, DeviceCodec* device_codec, SourceElements elements) {
  if (device_codec) return std::make_unique<StagedSource>(*device_codec, std::move(elements));
  return std::make_unique<HostSource>(op, std::move(elements));
}

namespace {

class HostSink final : public Sink {
 public:
  HostSink(OpContext& op, SinkElements elements) : op_(op), elements_(elements) {}

  void take(size_t k, std::span<const std::byte> payload, int sender) override {
    const MessagePlan& plan = elements_.plan;
    op_.attribute(sender, [&] {
      size_t at = 0;  // in the payload
      for (const Run& run : plan.frames[k].runs) {
        const size_t to = run.at * itemBytes(plan.dtype);
        std::byte* y = static_cast<std::byte*>(elements_.data) + to;
        const bool there = elements_.sent && run.codec->spec().id == CodecId::none &&
                           y == static_cast<const std::byte*>(elements_.sent) + to;
        const auto whole = parts_.take(run, sender, payload.subspan(at, run.bytes));
        at += run.bytes;
        if (run.last() && !there) run.codec->decode(y, plan.dtype, whole, run.offset, run.count);
      }
    });
  }

 private:
  OpContext& op_;
  const SinkElements elements_;
  IncomingParts parts_;
};

}  // namespace

std::unique_ptr<Sink> makeSink(OpContext& op, DeviceCodec* device_codec, SinkElements elements) {
  if (device_codec) return std::make_unique<StagedSink>(op, *device_codec, elements);
  return std::make_unique<HostSink>(op, elements);
}

}  // namespace lowcomm
