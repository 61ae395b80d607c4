#include "collective/source.h"

#include <utility>

#include "collective/loss.h"
#include "collective/plan.h"
#include "collective/staged.h"

namespace lowcomm {
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

}  // namespace lowcomm
