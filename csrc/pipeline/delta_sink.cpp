#include "pipeline/delta_sink.h"

namespace lowcomm {

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
