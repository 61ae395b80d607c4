#include "pipeline/delta_source.h"

#include <algorithm>
#include <cmath>

#include "base/narrow_float.h"

namespace lowcomm {
namespace {

constexpr uint64_t kMeasured = 1024;  // elements of a run whose sizes are taken

float elementOf(const std::byte* data, DType dtype, uint64_t at) {
  if (dtype == DType::float32) return reinterpret_cast<const float*>(data)[at];
  const uint16_t half = reinterpret_cast<const uint16_t*>(data)[at];
  return dtype == DType::float16 ? float16ToFloat(half) : bfloat16ToFloat(half);
}

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
    for (uint64_t i = 0; i < run.count; ++i)
      decoded_[i] = elementOf(a, plan_.dtype, i);
  } else {
    run.codec->decode(decoded_.data(), DType::float32, whole, run.offset, run.count);
  }
  remember(update_.after(run.at), decoded_.data(), run.count);
}

void DeltaSource::measure(const Run& run, const std::byte* a) {
  if (!sizes_) return;
  const Elements m = update_.before(run.at);
  for (uint64_t i = 0; i < std::min(run.count, kMeasured); ++i) {
    const float value = elementOf(a, plan_.dtype, i);
    sizes_->values += std::abs(value);
    sizes_->changes += std::abs(value - elementOf(static_cast<const std::byte*>(m.data), m.dtype, i));
  }
}

}  // namespace lowcomm
