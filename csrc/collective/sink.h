#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "collective/context.h"
#include "collective/plan.h"
#include "collective/stage.h"

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

  // Frame k, which `sender` has sent; in order. What does not decode is blamed on it (OpContext::blame): by this call,
  // a later one or `settle`.
  virtual void take(size_t k, std::span<const std::byte> payload, int sender) = 0;

  // After the last frame: nothing more is to be blamed on anybody. Elements in host memory are there.
  virtual void settle() {}
};

// To host memory, or to where `stage` is.
std::unique_ptr<Sink> makeSink(OpContext& op, Stage* stage, SinkElements elements);

}  // namespace lowcomm
