// Slots that are read ahead and written behind: what a caller reads is what was written last, whatever its store does.
#include "pipeline/buffered_store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace lowcomm {
namespace {

constexpr size_t kSlot = 64;
constexpr size_t kWaiting = 4;

std::vector<std::byte> slotOf(uint64_t sample, uint32_t version) {
  return std::vector<std::byte>(kSlot, static_cast<std::byte>(sample * 31 + version * 7));
}

// Slots in memory, behind a disk that may be held up, and that may fail.
class Disk final : public SlotStore {
 public:
  struct State {
    std::mutex held;           // while a test has it, nothing is read or written
    std::set<uint64_t> fails;  // samples that can be neither written nor read
    std::atomic<int> reads{0}, written{0};
  };

  explicit Disk(std::shared_ptr<State> state) : state_(std::move(state)) {}

  uint32_t version(uint64_t sample) const override { return slots_.version(sample); }
  void read(uint64_t sample, std::byte* to) override {
    ++state_->reads;
    std::lock_guard<std::mutex> lock(state_->held);
    if (state_->fails.contains(sample)) {
      slots_.forget(sample);
      throw FileError("the disk: could not read", "disk", EIO);
    }
    slots_.read(sample, to);
  }
  void write(uint64_t sample, uint32_t version, const std::byte* from) override {
    std::lock_guard<std::mutex> lock(state_->held);
    if (state_->fails.contains(sample)) {
      slots_.forget(sample);
      throw FileError("the disk: could not write", "disk", ENOSPC);
    }
    slots_.write(sample, version, from);
    ++state_->written;
  }
  void forget(uint64_t sample) override { slots_.forget(sample); }
  std::vector<SlotSummary> table() const override { return slots_.table(); }
  uint64_t slots() const override { return slots_.slots(); }

 private:
  const std::shared_ptr<State> state_;
  RamStore slots_{kSlot};
};

struct StoreOnDisk {
  explicit StoreOnDisk(uint64_t samples = 0) {
    auto disk = std::make_unique<Disk>(state);
    for (uint64_t sample = 0; sample < samples; ++sample)
      disk->write(sample, 1, slotOf(sample, 1).data());
    store = std::make_unique<BufferedStore>(std::move(disk), kSlot, kWaiting, "disk");
  }
  void write(uint64_t sample, uint32_t version) { store->write(sample, version, slotOf(sample, version).data()); }
  void expect(uint64_t sample, uint32_t version) {
    std::vector<std::byte> slot(kSlot);
    ASSERT_EQ(store->version(sample), version) << sample;
    store->read(sample, slot.data());
    EXPECT_EQ(slot, slotOf(sample, version)) << sample;
  }
  const std::shared_ptr<Disk::State> state = std::make_shared<Disk::State>();
  std::unique_ptr<BufferedStore> store;
};

TEST(BufferedStore, SlotsAreReadBeforeTheyAreAskedFor) {
  StoreOnDisk buffered(8);
  buffered.store->readAhead({0, 1, 2, 100});  // 100 has no slot
  buffered.store->flush();                    // returns when the thread has nothing to do
  while (buffered.state->reads < 3)
    std::this_thread::yield();
  buffered.store->table();
  for (uint64_t sample = 0; sample < 4; ++sample)
    buffered.expect(sample, 1);
  EXPECT_EQ(buffered.store->reads().ahead, 3u);
  EXPECT_EQ(buffered.store->reads().late, 1u);
}

// The present batch writes what the next one reads: never the slot from before.
TEST(BufferedStore, ASampleOfTwoBatchesIsReadAfterItsWrite) {
  StoreOnDisk buffered(8);
  for (uint32_t visit = 1; visit < 50; ++visit) {
    buffered.store->readAhead({0, 1, 2, 3});
    for (uint64_t sample = 0; sample < 4; ++sample)
      buffered.expect(sample, visit);
    for (uint64_t sample = 0; sample < 4; ++sample)
      buffered.write(sample, visit + 1);
  }
  EXPECT_EQ(buffered.store->slots(), 8u);
  EXPECT_EQ(buffered.store->table()[3].version, 50u);
}

TEST(BufferedStore, AWriteReturnsBeforeTheDiskDoes) {
  StoreOnDisk buffered;
  {
    std::lock_guard<std::mutex> held(buffered.state->held);
    for (uint32_t visit = 1; visit <= kWaiting; ++visit)
      buffered.write(7, visit);
    buffered.expect(7, kWaiting);
    EXPECT_EQ(buffered.store->slots(), 1u);
    auto fifth = std::async(std::launch::async, [&] { buffered.write(8, 1); });
    EXPECT_EQ(fifth.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout) << "no more may wait";
    buffered.state->held.unlock();
    fifth.get();
    buffered.state->held.lock();
  }
  buffered.store->flush();
  buffered.expect(7, kWaiting);
  EXPECT_EQ(buffered.store->slots(), 2u);
}

TEST(BufferedStore, AFailedWriteIsToldOnceAndForgotten) {
  StoreOnDisk buffered;
  buffered.state->fails = {5};
  buffered.write(4, 1);
  buffered.write(5, 1);
  EXPECT_THROW(buffered.store->flush(), FileError);
  buffered.store->check();
  buffered.store->flush();
  EXPECT_EQ(buffered.store->version(5), 0u);
  EXPECT_EQ(buffered.store->slots(), 1u);
  EXPECT_EQ(buffered.store->forgotten().at("not_written"), 1u);
  buffered.expect(4, 1);
}

TEST(BufferedStore, AFailedReadAheadIsTold) {
  StoreOnDisk buffered(3);
  buffered.state->fails = {1};
  buffered.store->readAhead({0, 1});
  while (buffered.state->reads < 2)
    std::this_thread::yield();
  buffered.store->table();
  EXPECT_THROW(buffered.store->check(), FileError);
  buffered.store->check();
  EXPECT_EQ(buffered.store->slots(), 2u);
  EXPECT_EQ(buffered.store->version(1), 0u);
}

TEST(BufferedStore, AForgottenSlotDoesNotComeBack) {
  StoreOnDisk buffered(2);
  buffered.store->readAhead({0, 1});
  buffered.write(0, 2);
  buffered.store->forget(0);
  buffered.store->forget(0);
  EXPECT_EQ(buffered.store->version(0), 0u);
  EXPECT_EQ(buffered.store->slots(), 1u);
  buffered.write(0, 1);
  buffered.expect(0, 1);
}

TEST(BufferedStore, TheEndWritesWhatWaits) {
  StoreOnDisk buffered;
  for (uint64_t sample = 0; sample < 3; ++sample)
    buffered.write(sample, 1);
  buffered.store.reset();
  EXPECT_EQ(buffered.state->written, 3);
}

// Against a plain map, with a thread that is always at work.
TEST(BufferedStore, RandomCallsHaveTheirOracle) {
  std::mt19937 random(0);
  StoreOnDisk buffered;
  std::map<uint64_t, uint32_t> oracle;
  for (int step = 0; step < 2000; ++step) {
    const uint64_t sample = random() % 24;
    switch (random() % 6) {
      case 0:
        buffered.store->readAhead({sample, (sample + 1) % 24, (sample + 2) % 24});
        break;
      case 1:
        buffered.store->forget(sample);
        oracle.erase(sample);
        break;
      case 2:
        if (random() % 16 == 0) EXPECT_EQ(buffered.store->table().size(), oracle.size());
        break;
      default:
        if (oracle.contains(sample) && random() % 2) {
          buffered.expect(sample, oracle[sample]);
        } else {
          buffered.write(sample, ++oracle[sample]);
        }
    }
    ASSERT_EQ(buffered.store->slots(), oracle.size());
  }
  for (const auto& [sample, version] : oracle)
    buffered.expect(sample, version);
}

}  // namespace
}  // namespace lowcomm
