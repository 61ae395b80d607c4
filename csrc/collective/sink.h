#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "collective/context.h"
#include "collective/device_codec.h"
#include "collective/plan.h"

namespace lowcomm {

// Where one message is decoded to: room for its plan's elements, flat. All of it lives as long as the sink.
struct SinkElements {
  const MessagePlan& plan;
  void* data;
  const void* sent = nullptr;  // what the message was encoded from, in this process: exact runs that are there already
};

// One message on its way out of frames.
class Sink {
 public:
  virtual ~Sink() = default;

  // Frame k, which `sender` has sent; in order. What does not decode is attributed to it (OpContext::attribute): by
  // this call, a later one or `wait`.
  virtual void take(size_t k, std::span<const std::byte> payload, int sender) = 0;

  // After the last frame: nothing more is to be attributed to anybody. Elements in host memory are there.
  virtual void wait() {}
};

// To host memory, or to where `device_codec` is.
std::unique_ptr<Sink> makeSink(OpContext& op, DeviceCodec* device_codec, SinkElements elements);

}  // namespace lowcomm
