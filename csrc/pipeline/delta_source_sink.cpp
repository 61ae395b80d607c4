#include "pipeline/delta_source_sink.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace lowcomm {

namespace {

constexpr uint64_t kMeasured = 1024;  // elements of a run whose sizes are taken

}  // namespace

DeltaSource::DeltaSource(OpContext& op, const MessagePlan& plan, const void* data, SampleUpdate& update,
                         const Draws& draws)
    : op_(op),
      plan_(plan),
      data_(static_cast<const std::byte*>(data)),
      update_(update),
      draws_(draws),
      fused_(plan.layout.segments().size()) {}

void DeltaSource::encode(size_t k, std::span<std::byte> payload) {
  for (const Run& run : plan_.frames[k].runs) {
    parts_.write(payload.first(run.bytes), run, 0, [&](std::span<std::byte> whole) { encodeRun(k, run, whole); });
    payload = payload.subspan(run.bytes);
  }
}

void DeltaSource::encodeRun(size_t k, const Run& run, std::span<std::byte> whole) {
  const std::byte* a = data_ + run.at * itemBytes(plan_.dtype);
  const Draws draws = draws_.slot(run.segment);
  const State m = update_.state(run.at, run.count);
  if (update_.seen(run.at)) {
    std::unique_ptr<FusedCodec>& fused = fused_[run.segment];
    if (!fused) fused = std::make_unique<FusedCodec>(run.codec);
    const std::optional<Window> window = measure(k, run, a, {m.data, m.dtype}, draws);
    try {
      fused->encodeDelta(whole, {a, plan_.dtype}, m, run.offset, run.count, draws);
    } catch (const NonFiniteError& error) {
      throw run.inMessage(error, "");
    }
    if (window) addLossOf(op_.counters.loss, run, *window, change_, draws);
  } else {
    run.encode(whole, a, plan_.dtype, draws);
    decoded_.resize(run.count);
    if (run.codec->spec().id == CodecId::none) {
      toFloats({a, plan_.dtype}, decoded_.data(), run.count);
    } else {
      run.codec->decode(decoded_.data(), DType::float32, whole, run.offset, run.count);
    }
    remember(m, decoded_.data(), run.count);
  }
  update_.finish(run.at, run.count);
}

// Adds sums over the run's first elements. Returns the window of the message, if it is in this run, of which the loss
// is sampled as other ops sample theirs: `change_` has its changes, which are gone once they are encoded.
std::optional<Window> DeltaSource::measure(size_t k, const Run& run, const std::byte* a, Elements m,
                                           const Draws& draws) {
  const auto widened = [&](uint64_t first, uint64_t count, float* values, float* remembered) {
    toFloats({a + first * itemBytes(plan_.dtype), plan_.dtype}, values, count);
    toFloats({static_cast<const std::byte*>(m.data) + first * itemBytes(m.dtype), m.dtype}, remembered, count);
  };
  SampleCounters& samples = op_.counters.samples;
  const uint64_t count = std::min(run.count, kMeasured);
  std::array<float, kMeasured> values, remembered;
  widened(0, count, values.data(), remembered.data());
  for (uint64_t i = 0; i < count; ++i) {
    samples.values += std::abs(values[i]);
    samples.changes += std::abs(values[i] - remembered[i]);
  }
  samples.measured += count;

  const std::optional<Window> window = windowOf(op_.counters.loss, k, plan_.frames.size(), run, draws.step);
  if (!window) return window;
  change_.resize(window->count);
  decoded_.resize(window->count);
  widened(window->first, window->count, change_.data(), decoded_.data());
  for (uint64_t i = 0; i < window->count; ++i)
    change_[i] -= decoded_[i];
  return window;
}

DeltaSink::DeltaSink(OpContext& op, const MessagePlan& plan, void* data, SampleUpdate& update)
    : op_(op),
      plan_(plan),
      data_(static_cast<std::byte*>(data)),
      update_(update),
      fused_(plan.layout.segments().size()) {}

void DeltaSink::take(size_t k, std::span<const std::byte> payload, int sender) {
  op_.attribute(sender, [&] {
    for (const Run& run : plan_.frames[k].runs) {
      const auto whole = parts_.take(run, sender, payload.first(run.bytes));
      if (run.last()) decodeRun(run, whole);
      payload = payload.subspan(run.bytes);
    }
  });
}

void DeltaSink::decodeRun(const Run& run, std::span<const std::byte> whole) {
  std::byte* y = data_ + run.at * itemBytes(plan_.dtype);
  const State m = update_.state(run.at, run.count);
  if (update_.seen(run.at)) {
    std::unique_ptr<FusedCodec>& fused = fused_[run.segment];
    if (!fused) fused = std::make_unique<FusedCodec>(run.codec);
    fused->decodeDelta(whole, {y, plan_.dtype}, {m.data, m.dtype}, m, run.offset, run.count);
  } else {
    run.codec->decode(y, plan_.dtype, whole, run.offset, run.count);
    decoded_.resize(run.count);
    if (run.codec->spec().id != CodecId::none) {
      run.codec->decode(decoded_.data(), DType::float32, whole, run.offset, run.count);
    } else {
      toFloats({y, plan_.dtype}, decoded_.data(), run.count);
    }
    remember(m, decoded_.data(), run.count);
  }
  update_.finish(run.at, run.count);
}

}  // namespace lowcomm
