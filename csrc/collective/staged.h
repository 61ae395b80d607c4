#pragma once

#include <cstddef>
#include <deque>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "collective/device_codec.h"
#include "collective/plan.h"
#include "collective/sink.h"
#include "collective/source.h"

namespace lowcomm {

class OpContext;

// A message that is encoded on a device: `start` enqueues the kernels of a frame's runs and one copy of their payloads,
// `encode` waits for it. A codec that cannot be cut makes its payload with the frame that has the first part.
class StagedSource final : public Source {
 public:
  StagedSource(DeviceCodec& device_codec, SourceElements elements)
      : device_codec_(device_codec), elements_(std::move(elements)) {}

  void start(size_t k) override;
  void encode(size_t k, std::span<std::byte> payload) override;  // starts the frame where nobody has

 private:
  // Payloads that begin in one frame, end to end.
  struct FrameInFlight {
    size_t k = 0;
    DeviceCodec::SlotPtr slot;
    std::vector<const Run*> runs;
  };
  const void* elementsOf(const Run& run) const;
  void settle(FrameInFlight& frame);
  void encodeOnHost(FrameInFlight& frame);

  DeviceCodec& device_codec_;
  const SourceElements elements_;
  std::deque<FrameInFlight> started_;
  DeviceCodec::SlotPtr open_{nullptr, {nullptr}};  // of a payload that goes on in later frames, where it ends the slot
};

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

// Elements on a device that stay with their owner and are not encoded, so that no codec looks at them: what
// Codec::expectTaken is on the host. They are encoded for the sake of the refused word alone; the payload stays there.
class StagedCheck {
 public:
  // Of the plan's frames from `data` on, which both outlive this. `of` ends a NonFiniteError.
  StagedCheck(DeviceCodec& device_codec, const MessagePlan& plan, const void* data, std::string of)
      : device_codec_(device_codec), plan_(plan), data_(static_cast<const std::byte*>(data)), of_(std::move(of)) {}

  // Begins to look at frame k, and throws the NonFiniteError of one that was begun; each in order, at most two frames
  // under way. Nothing past the last frame.
  void start(size_t k);
  void finish(size_t k);

 private:
  struct FrameInFlight {
    DeviceCodec::SlotPtr slot;
    std::vector<const Run*> runs;
  };

  DeviceCodec& device_codec_;
  const MessagePlan& plan_;
  const std::byte* const data_;
  const std::string of_;
  std::deque<FrameInFlight> begun_;
};

}  // namespace lowcomm
