#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "codec/codec.h"
#include "collective/context.h"
#include "collective/device_codec.h"
#include "collective/plan.h"

namespace lowcomm {

// The elements that one message is encoded from: of its plan's layout and dtype, flat. All of it lives as long as the
// source.
struct SourceElements {
  const MessagePlan& plan;
  const void* data;
  Draws draws;              // stream without its segment number
  std::string of = {};      // ends the message of a NonFiniteError
  void* decoded = nullptr;  // of staged elements: takes what they decode to, frame by frame; may be `data`
};

// One message on its way into frames.
class Source {
 public:
  virtual ~Source() = default;

  // Phase::start of a frame, before encode of it; each once, in order.
  virtual void start(size_t /*k*/) {}

  // The payload of frame k. Throws what Run::encode does.
  virtual void encode(size_t k, std::span<std::byte> payload) = 0;
};

// Of elements in host memory, or where `device_codec` is. What encoding loses is sampled of the former alone: a sample
// would be elements that cross to the host.
std::unique_ptr<Source> makeSource(OpContext& op, DeviceCodec* device_codec, SourceElements elements);

}  // namespace lowcomm
