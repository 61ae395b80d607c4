#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "collective/device_codec.h"
#include "collective/source.h"

namespace lowcomm {

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

}  // namespace lowcomm
