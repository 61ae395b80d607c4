// The calls of a staged collective to a device, and their order: through c10's guard, of which there is a fake here.
#include "tensor/device_queue.h"

#include <c10/core/Allocator.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "collective/collectives.h"
#include "fake_device.h"
#include "host_device_codec.h"
#include "ranks_on_threads.h"

namespace lowcomm {
namespace {

using namespace fake_device;
using test::Ranks;

// Device memory that is the heap's; it stays until the end, for work may come late.
struct FakeAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    tell("allocate on " + named(c10::Stream(c10::Stream::UNSAFE, {kType, current}, streams[current])));
    const auto whole = memory_.emplace(memory_.end(), bytes + 64);
    const size_t over = reinterpret_cast<uintptr_t>(whole->data()) % 64;
    return {whole->data() + (over ? 64 - over : 0), c10::Device(kType, current)};
  }
  void copy_data(void*, const void*, std::size_t) const override {}

 private:
  std::list<std::vector<std::byte>> memory_;
};

// The real queue; what was enqueued is done when its event is waited for.
class FakeQueue final : public CodecQueue {
 public:
  FakeQueue(const DeviceQueue& queue, std::shared_ptr<test::LateDevice> device)
      : queue_(queue, [device](size_t bytes) { return device->memory(bytes); }), device_(device) {}
  Memory deviceMemory(size_t bytes) override { return queue_.deviceMemory(bytes); }
  Memory pinnedMemory(size_t bytes) override { return queue_.pinnedMemory(bytes); }
  Wait mark() override {
    return [wait = queue_.mark(), device = device_, until = device_->enqueued()] {
      wait();
      device->wait(until);
    };
  }

 private:
  DeviceCodecQueue queue_;
  const std::shared_ptr<test::LateDevice> device_;
};

class DeviceCodecQueueTest : public testing::Test {
 protected:
  void SetUp() override {
    static FakeAllocator allocator;
    c10::SetAllocator(kType, &allocator);
    reset();
  }

  // A device codec of one device that tells its orders to `told`, after what a caller's stream has enqueued.
  static std::unique_ptr<DeviceCodec> device_codec(c10::DeviceIndex index, size_t slot_bytes) {
    DeviceQueue queue({kType, index});
    queue.enter();
    auto device = std::make_shared<test::LateDevice>(told);
    return std::make_unique<DeviceCodec>(std::make_unique<FakeQueue>(queue, device),
                                         std::make_unique<test::LateKernels>(device), slot_bytes);
  }

  static size_t find(const std::string& text, size_t from = 0) {
    for (size_t i = from; i < told.size(); ++i) {
      if (told[i].starts_with(text)) return i;
    }
    ADD_FAILURE() << "no '" << text << "' after " << from;
    return told.size();
  }
};

constexpr uint64_t kPart = 5 * 32768;  // elements: five frames of bf16

void gather(OpContext& op, std::unique_ptr<DeviceCodec> device_codec) {
  std::vector<float> x(kPart, 1.0f), y(kPart * 2);
  GatherMessage message;
  message.layouts = {Layout::single(kPart, CodecSpec::parse("bf16"))};
  message.dtype = DType::float32;
  message.input = x.data();
  message.outputs = {y.data(), y.data() + kPart};
  message.device_codec = device_codec.get();
  allGather(op, {message});
  device_codec.reset();  // waits
  EXPECT_EQ(y, std::vector<float>(kPart * 2, 1.0f));
}

TEST_F(DeviceCodecQueueTest, AFrameIsMadeWhileTheOneBeforeIsWaitedFor) {
  Ranks ranks(2);
  ranks.expectRun("all_gather", [&](int rank, OpContext& op) {
    gather(op, rank == 0 ? device_codec(1, op.group.chunk_bytes) : nullptr);
  });
  // The side stream waits for the caller's before anything is enqueued, and its memory is its own.
  EXPECT_EQ(told[0], "record e1 on 1:6");
  EXPECT_EQ(told[1], "block 1:7 on e1");
  for (const auto& order : told) {
    if (order.starts_with("allocate") || (order.starts_with("record") && order != told[0])) {
      EXPECT_TRUE(order.ends_with("on 1:7")) << order;
    }
  }
  // Kernel, copy and event of the next frame, then the host waits for this one's.
  const size_t first = find("encode 0"), marked = find("record e2", first);
  const size_t second = find("encode 32768"), marked_too = find("record e3", second);
  EXPECT_LT(marked, second);
  EXPECT_LT(marked_too, find("synchronize e2"));
  EXPECT_LT(find("synchronize e2"), find("encode 65536"));
}

// A slot's buffers are given to another frame once the event of what was copied from them has passed.
TEST_F(DeviceCodecQueueTest, ASlotIsUsedAgainAfterItsEvent) {
  auto held = device_codec(0, 1024);
  const auto work = [&](std::byte value) {
    auto slot = held->take(64);
    std::fill_n(slot->host(), 64, value);
    held->load(*slot);
    held->report(*slot);
    return slot->host();
  };
  told.clear();
  std::byte* const host = work(std::byte{1});
  EXPECT_EQ(find("record e3 on 0:7") + 1, told.size());  // what was loaded, then what was reported
  EXPECT_EQ(work(std::byte{2}), host);
  EXPECT_LT(find("synchronize e3"), find("record e4 on 0:7"));
  const size_t before = told.size();
  held.reset();
  EXPECT_LT(find("record e6 on 0:7", before), find("synchronize e6", before));  // the end of the queue
}

}  // namespace
}  // namespace lowcomm
