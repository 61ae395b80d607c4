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
//   DeviceQueue::join(done)        the stream current at that moment waits for it (what Work::wait() does)
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
  static void join(const Mark& mark);
  static void block(const Mark& mark);

  c10::Device device() const { return device_; }
  c10::Stream stream() const { return side_; }

 private:
  c10::Device device_;
  c10::Stream side_;
};

}  // namespace lowcomm
