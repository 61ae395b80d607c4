#pragma once

#include <cstddef>
#include <deque>
#include <span>
#include <vector>

#include "collective/device_codec.h"
#include "collective/plan.h"
#include "collective/sink.h"

namespace lowcomm {

// Frames whose decoding a device may still be at, for each message: while the host copies one into a slot, the device
// decodes the one before.
inline constexpr size_t kStagedFrames = 2;

// A message that is decoded on a device: each frame's payloads are copied there and their kernels enqueued; what was
// refused is found when the frame after next comes, or at the end.
class StagedSink final : public Sink {
 public:
  StagedSink(OpContext& op, DeviceCodec& device_codec, SinkElements elements)
      : op_(op), device_codec_(device_codec), elements_(elements) {}

  void take(size_t k, std::span<const std::byte> payload, int sender) override;
  void wait() override;

 private:
  struct FrameInFlight {
    int sender;
    DeviceCodec::SlotPtr slot;
    std::vector<const Run*> runs;
  };
  std::byte* elementsOf(const Run& run) const;
  void waitForFirst();
  void decodeOnHost(const FrameInFlight& taken);

  OpContext& op_;
  DeviceCodec& device_codec_;
  const SinkElements elements_;
  IncomingParts parts_;
  std::deque<FrameInFlight> taken_;
};

// Exact payloads have no kernel that looks at them: their padding is checked here. Throws WireError.
void expectPadded(const Run& run, DType dtype, std::span<const std::byte> payload);

}  // namespace lowcomm
