#include "collective/sink.h"

#include "collective/plan.h"
#include "collective/staged.h"

namespace lowcomm {
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
