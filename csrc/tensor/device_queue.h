#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>

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

// Who tells whether the current stream captures where c10 cannot (torch before 2.13); null: nobody.
using AskCapturing = bool (*)();
void setAskCapturing(AskCapturing ask);

}  // namespace lowcomm
