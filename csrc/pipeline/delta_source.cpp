#include "pipeline/delta_source.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace lowcomm {
namespace {

constexpr uint64_t kMeasured = 1024;  // elements of a run whose sizes are taken

}  // namespace

DeltaSource::DeltaSource(const MessagePlan& plan, const void* data, SampleUpdate& update, const Draws& draws,
                         DeltaSizes* sizes)
    : plan_(plan),
      data_(static_cast<const std::byte*>(data)),
      update_(update),
      draws_(draws),
      sizes_(sizes),
      fused_(plan.layout.segments().size()) {}

void DeltaSource::encode(size_t k, std::span<std::byte> payload) {
  for (const Run& run : plan_.frames[k].runs) {
    parts_.write(payload.first(run.bytes), run, 0, [&](std::span<std::byte> whole) { encodeRun(run, whole); });
    payload = payload.subspan(run.bytes);
  }
}

void DeltaSource::encodeRun(const Run& run, std::span<std::byte> whole) {
  const std::byte* a = data_ + run.at * itemBytes(plan_.dtype);
  const Draws draws = draws_.slot(run.segment);
  if (update_.seen(run.at)) {
    std::unique_ptr<FusedCodec>& fused = fused_[run.segment];
    if (!fused) fused = std::make_unique<FusedCodec>(run.codec);
    measure(run, a);
    try {
      return fused->encodeDelta(whole, {a, plan_.dtype}, update_.before(run.at), update_.after(run.at), run.offset,
                                run.count, draws);
    } catch (const NonFiniteError& error) {
      throw run.inMessage(error, "");
    }
  }
  run.encode(whole, a, plan_.dtype, draws);
  decoded_.resize(run.count);
  if (run.codec->spec().id == CodecId::none) {
    toFloats({a, plan_.dtype}, decoded_.data(), run.count);
  } else {
    run.codec->decode(decoded_.data(), DType::float32, whole, run.offset, run.count);
  }
  remember(update_.after(run.at), decoded_.data(), run.count);
}

void DeltaSource::measure(const Run& run, const std::byte* a) {
  if (!sizes_) return;
  const uint64_t count = std::min(run.count, kMeasured);
  std::array<float, kMeasured> values, remembered;
  toFloats({a, plan_.dtype}, values.data(), count);
  toFloats(update_.before(run.at), remembered.data(), count);
  for (uint64_t i = 0; i < count; ++i) {
    sizes_->values += std::abs(values[i]);
    sizes_->changes += std::abs(values[i] - remembered[i]);
  }
}

}  // namespace lowcomm
