#include "backend/device_queue.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace lowcomm {
namespace {

c10::Stream sideStream(c10::Device device) {
  c10::DeviceGuard guard(device);
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

c10::Stream currentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

DeviceQueue::DeviceQueue(c10::Device device) : device_(device), side_(sideStream(device)) {}

DeviceQueue::Mark DeviceQueue::reached() const {
  auto event = std::make_shared<c10::Event>(device_.type());
  event->record(currentStream(device_));
  return event;
}

void DeviceQueue::follow(const Mark& mark) {
  mark->block(side_);
}

void DeviceQueue::run(const std::function<void()>& enqueue) {
  c10::StreamGuard guard(side_);
  enqueue();
}

DeviceQueue::Mark DeviceQueue::mark() {
  auto event = std::make_shared<c10::Event>(device_.type());
  event->record(side_);
  return event;
}

void DeviceQueue::join(const Mark& mark) {
  const c10::Device device(mark->device_type(), mark->device_index());
  mark->block(currentStream(device));
}

void DeviceQueue::block(const Mark& mark) {
  mark->synchronize();
}

}  // namespace lowcomm
