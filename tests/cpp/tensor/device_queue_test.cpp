#include "tensor/device_queue.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <array>
#include <set>
#include <string>
#include <vector>

#include "fake_device.h"

namespace lowcomm {
namespace {

using namespace fake_device;

using Told = std::vector<std::string>;

class DeviceQueueTest : public testing::Test {
 protected:
  void SetUp() override { reset(); }

  static void note() { tell("run on " + named(c10::impl::VirtualGuardImpl(kType).getStream({kType, current}))); }
};

TEST_F(DeviceQueueTest, OrdersTheSideStreamAfterTheCallers) {
  DeviceQueue queue({kType, 0});
  EXPECT_EQ(queue.device(), c10::Device(kType, 0));
  EXPECT_EQ(queue.stream().id(), kPoolStream);
  EXPECT_EQ(told, Told{});
  queue.enter();
  queue.run(note);
  DeviceQueue::block(queue.mark());
  EXPECT_EQ(told, (Told{"record e1 on 0:5", "block 0:7 on e1", "run on 0:7", "record e2 on 0:7", "synchronize e2"}));
}

TEST_F(DeviceQueueTest, SecondDevice) {
  DeviceQueue queue({kType, 1});
  EXPECT_EQ(current, 0);  // given back
  queue.enter();
  queue.run(note);
  EXPECT_EQ(current, 0);
  EXPECT_EQ(streams[1], 6);
  queue.mark();
  EXPECT_EQ(told, (Told{"record e1 on 1:6", "block 1:7 on e1", "run on 1:7", "record e2 on 1:7"}));
}

TEST_F(DeviceQueueTest, OccupyLastsAndTellsNoOtherDevice) {
  DeviceQueue::occupy({kType, 1});
  EXPECT_EQ(current, 1);
  DeviceQueue queue({kType, 1});
  queue.enter();
  queue.run(note);
  DeviceQueue::block(queue.mark());
  EXPECT_EQ(current, 1);
  EXPECT_EQ(contexts(), (std::set<c10::DeviceIndex>{1}));
}

// An op that uses the queue later than it was issued holds up nothing that was issued after it, nor is held up.
TEST_F(DeviceQueueTest, FollowsWhatTheCallerHadReached) {
  DeviceQueue queue({kType, 0});
  const auto issued = queue.reached();
  EXPECT_EQ(told, (Told{"record e1 on 0:5"}));
  queue.run(note);
  queue.follow(issued);
  queue.run(note);
  EXPECT_EQ(told, (Told{"record e1 on 0:5", "run on 0:7", "block 0:7 on e1", "run on 0:7"}));
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
