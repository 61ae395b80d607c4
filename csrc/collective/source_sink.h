#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "collective/context.h"
#include "collective/device_codec.h"
#include "collective/op_context.h"
#include "collective/plan.h"

namespace lowcomm {

// How much encoding loses, from a sample that takes little next to the encoding itself: of one frame of each op some
// thousands of elements, in another frame and place from step to step.

// Elements of a run that stand for their op, counted in the run.
struct Window {
  uint64_t first, count;
};

inline constexpr uint64_t kSampled = 4096;           // elements of a sample ...
inline constexpr uint64_t kMostSampled = 16 * 1024;  // ... but no fewer than the codec takes at once, up to so many

// The sample of an op that lies in this run of frame k of `frames`. Nothing where it is elsewhere, was taken, the run
// travels exact, or its codec takes more than kMostSampled elements at once.
std::optional<Window> windowOf(const Loss& loss, size_t k, size_t frames, const Run& run, uint32_t step);

// Adds what encoding loses of x to `loss`, both fp32; what is not finite is left out.
void addLoss(Loss& loss, const float* x, const float* decoded, uint64_t count);

// Adds what encoding loses of a window of a run: `x` is encoded as the run's elements there, and decoded.
void addLossOf(Loss& loss, const Run& run, const Window& window, const std::vector<float>& x, const Draws& draws);

// Both for a run that has been encoded from `src` with these draws: the window is encoded once more, and decoded.
void sample(Loss& loss, size_t k, size_t frames, const Run& run, const void* src, DType dtype, const Draws& draws);

// The elements that one message is encoded from: of its plan's layout and dtype, flat. All of it lives as long as the
// source.
struct SourceElements {
  const MessagePlan& plan;
  const void* data;
  Draws draws;              // stream without its segment number
  std::string of = {};      // ends the message of a NonFiniteError
  void* decoded = nullptr;  // of staged elements: takes what they decode to, frame by frame; may be `data`
  // For staged elements: where those of each segment are, with their draws' slots and residuals, instead of data; or
  // null.
  const std::vector<ScatterEntry>* entries = nullptr;
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

// Makes a source for host memory, or for the device of `device_codec`. Only host sources sample the encoding error: on
// a device that would copy elements to the host.
std::unique_ptr<Source> makeSource(OpContext& op, DeviceCodec* device_codec, SourceElements elements);

// Where one message is decoded to: room for its plan's elements, flat. All of it lives as long as the sink.
struct SinkElements {
  const MessagePlan& plan;
  void* data;
  const void* sent = nullptr;  // what the message was encoded from, in this process: exact runs that are there already
  const std::vector<ScatterEntry>* entries = nullptr;  // of staged elements: each segment's, in place of data; or null
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
