#include "fake_device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

namespace lowcomm::fake_device {

std::vector<std::string> told;
c10::DeviceIndex current = 0;
std::array<c10::StreamId, kDevices> streams;

namespace {

uintptr_t events = 0;

std::string event(void* handle) {
  return "e" + std::to_string(reinterpret_cast<uintptr_t>(handle));
}

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  FakeGuard() = default;
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kType, current);
    current = device.index();
    return before;
  }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, streams[device.index()]);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    // A pool belongs to the current device in CUDA: asking under another one would hand out a stream of the wrong one.
    EXPECT_EQ(device.index(), current);
    return c10::Stream(c10::Stream::UNSAFE, device, kPoolStream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** handle, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*handle) *handle = reinterpret_cast<void*>(++events);
    told.push_back("record " + event(*handle) + " on " + named(stream));
  }
  void block(void* handle, const c10::Stream& stream) const override {
    told.push_back("block " + named(stream) + " on " + event(handle));
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void* handle) const override { told.push_back("synchronize " + event(handle)); }
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

}  // namespace

std::string named(const c10::Stream& stream) {
  return std::to_string(stream.device_index()) + ":" + std::to_string(stream.id());
}

void reset() {
  told.clear();
  current = 0;
  streams = {5, 6};
  events = 0;
}

}  // namespace lowcomm::fake_device
