#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "collective/device_codec.h"

namespace lowcomm {

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
