#include "tensor/device_queue.h"

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

AskCapturing installed = nullptr;

template <class Stream>
bool captures(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) {
    return stream.is_capturing();
  } else {
    return installed && installed();
  }
}

}  // namespace

void setAskCapturing(AskCapturing ask) {
  installed = ask;
}

bool DeviceQueue::capturing(c10::Device device) {
  return captures(currentStream(device));
}

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

void DeviceQueue::block(const Mark& mark) {
  mark->synchronize();
}

void DeviceQueue::occupy(c10::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
}

}  // namespace lowcomm
