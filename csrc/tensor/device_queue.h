#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>

#include "collective/device_codec.h"

namespace lowcomm {

// Order between a caller's stream and lowcomm's side stream on one device, through c10's device-generic guard: no CUDA
// header, and a fake guard can stand in for a device in tests.
//
//   queue.enter();                 the side stream waits for what the caller has enqueued
//   auto then = queue.reached();   the same in two steps: what the caller has enqueued until here ...
//   queue.follow(then);            ... the side stream waits for from now on
//   queue.run([] { copies });      enqueues on the side stream
//   auto done = queue.mark();      an event after what was run
//   DeviceQueue::block(done)       the host waits for it
class DeviceQueue {
 public:
  using Mark = std::shared_ptr<c10::Event>;

  // A side stream of the device's own pool. Throws c10::Error when there is no guard for the device's type.
  explicit DeviceQueue(c10::Device device);

  void enter() { follow(reached()); }
  Mark reached() const;
  void follow(const Mark& mark);
  void run(const std::function<void()>& enqueue);
  Mark mark();
  static void block(const Mark& mark);

  // Whether what the caller's stream on that device is given now is captured for a CUDA graph and not run.
  static bool capturing(c10::Device device);

  // Makes a device the calling thread's own, for good: for threads that lowcomm started. A thread whose device is
  // another one (0, as every thread's at first) opens a context there, of hundreds of MB, each time a guard gives it
  // back.
  static void occupy(c10::Device device);

  c10::Device device() const { return device_; }
  c10::Stream stream() const { return side_; }

 private:
  c10::Device device_;
  c10::Stream side_;
};

// Asks whether the current stream captures, for torch before 2.13, whose c10 cannot tell; may be null.
using AskCapturing = bool (*)();
void setAskCapturing(AskCapturing ask);

// The parts of a device that a DeviceCodec needs, by c10's device-generic guard: no CUDA header, and a fake guard can
// stand in for a device in tests. Device memory is of torch's allocator for the device, taken while the side stream is
// current: it is that stream's, and may go back while the stream still works on it. Marks are events of the side
// stream.
class DeviceCodecQueue final : public CodecQueue {
 public:
  using Allocate = std::function<Memory(size_t bytes)>;

  // `pinned` gives memory that copies to and from the device may be enqueued for; without it torch's allocator does.
  explicit DeviceCodecQueue(const DeviceQueue& queue, Allocate pinned = nullptr);

  Memory deviceMemory(size_t bytes) override;
  Memory pinnedMemory(size_t bytes) override;
  Wait mark() override;

 private:
  DeviceQueue queue_;
  const Allocate pinned_;
};

// The kernels of this build for that queue's device, or nothing: the build has none, or none that run there. `because`
// then says which.
std::unique_ptr<CodecKernels> codecKernels(const DeviceQueue& queue, std::string& because);

// Makes kernels in place of the build, for a device that is simulated; null: the build makes them.
using MakeKernels = std::unique_ptr<CodecKernels> (*)();
void setCodecKernels(MakeKernels make);

// A stream as its driver knows it: native_handle() in most torch versions, stream_handle() in others, none in a few.
template <class Stream>
std::optional<void*> handleOf(const Stream& stream) {
  if constexpr (requires { stream.native_handle(); }) {
    return stream.native_handle();
  } else if constexpr (requires { stream.stream_handle(); }) {
    return stream.stream_handle();
  } else {
    return std::nullopt;
  }
}

}  // namespace lowcomm
