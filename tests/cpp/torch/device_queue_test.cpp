#include "backend/device_queue.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

namespace lowcomm {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::CUDA;
constexpr c10::DeviceIndex kDevices = 2;
constexpr c10::StreamId kPoolStream = 7;

// What a device would have been told, in order: "record e1 on 0:5", "block 0:7 on e1", "synchronize e1", "run on 0:7".
std::vector<std::string> told;
c10::DeviceIndex current = 0;
std::array<c10::StreamId, kDevices> streams;
uintptr_t events = 0;

std::string named(const c10::Stream& stream) {
  return std::to_string(stream.device_index()) + ":" + std::to_string(stream.id());
}

std::string event(void* handle) {
  return "e" + std::to_string(reinterpret_cast<uintptr_t>(handle));
}

// A device of two indices that does nothing but write down its orders: the CPU wheel has no guard of this type.
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

using Told = std::vector<std::string>;

class DeviceQueueTest : public testing::Test {
 protected:
  void SetUp() override {
    told.clear();
    current = 0;
    streams = {5, 6};  // of the caller
    events = 0;
  }

  static void note() {
    told.push_back("run on " + named(c10::impl::VirtualGuardImpl(kType).getStream({kType, current})));
  }
};

TEST_F(DeviceQueueTest, OrdersTheSideStreamAfterTheCallersAndBack) {
  DeviceQueue queue({kType, 0});
  EXPECT_EQ(queue.device(), c10::Device(kType, 0));
  EXPECT_EQ(queue.stream().id(), kPoolStream);
  EXPECT_EQ(told, Told{});
  queue.enter();
  queue.run(note);
  const auto mark = queue.mark();
  DeviceQueue::join(mark);
  DeviceQueue::block(mark);
  EXPECT_EQ(told, (Told{"record e1 on 0:5", "block 0:7 on e1", "run on 0:7", "record e2 on 0:7", "block 0:5 on e2",
                        "synchronize e2"}));
}

TEST_F(DeviceQueueTest, SecondDevice) {
  DeviceQueue queue({kType, 1});
  EXPECT_EQ(current, 0);  // given back
  queue.enter();
  queue.run(note);
  EXPECT_EQ(current, 0);
  EXPECT_EQ(streams[1], 6);
  const auto mark = queue.mark();
  DeviceQueue::join(mark);
  EXPECT_EQ(told, (Told{"record e1 on 1:6", "block 1:7 on e1", "run on 1:7", "record e2 on 1:7", "block 1:6 on e2"}));
}

// What Work::wait() promises: the stream that is current when it is called, not the one the op was issued on.
TEST_F(DeviceQueueTest, JoinIsOfTheStreamCurrentThen) {
  DeviceQueue queue({kType, 0});
  const auto mark = queue.mark();
  {
    c10::StreamGuard other(c10::Stream(c10::Stream::UNSAFE, {kType, 0}, 9));
    DeviceQueue::join(mark);
  }
  DeviceQueue::join(mark);
  EXPECT_EQ(told, (Told{"record e1 on 0:7", "block 0:9 on e1", "block 0:5 on e1"}));
}

TEST_F(DeviceQueueTest, EveryMarkIsAnEventOfItsOwn) {
  DeviceQueue queue({kType, 0});
  const auto first = queue.mark();
  queue.run(note);
  const auto second = queue.mark();
  DeviceQueue::block(first);
  DeviceQueue::block(second);
  EXPECT_EQ(told, (Told{"record e1 on 0:7", "run on 0:7", "record e2 on 0:7", "synchronize e1", "synchronize e2"}));
}

TEST_F(DeviceQueueTest, RunPutsTheStreamBackWhenItThrows) {
  DeviceQueue queue({kType, 1});
  EXPECT_THROW(queue.run([] { throw std::runtime_error("no memory"); }), std::runtime_error);
  EXPECT_EQ(current, 0);
  EXPECT_EQ(streams, (std::array<c10::StreamId, kDevices>{5, 6}));
}

TEST_F(DeviceQueueTest, NeedsAGuardOfItsDevice) {
  EXPECT_THROW(DeviceQueue({c10::DeviceType::XPU, 0}), c10::Error);
}

}  // namespace
}  // namespace lowcomm
