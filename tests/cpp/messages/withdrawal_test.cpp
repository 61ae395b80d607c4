// Withdrawals from a block of channels: nobody waits for what nobody sends, both sides count alike, and go on.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/op_queue.h"
#include "p2p_cases.h"

namespace lowcomm {
namespace {

using namespace test;

constexpr uint64_t kElements = 3000;
constexpr uint32_t kBlock = 2;

uint32_t numbered(uint32_t k) {
  return kBlock * kBlockChannels + k;
}

// One side's messages of `kElements` float32 on a few channels.
struct Side {
  explicit Side(Engine& engine) : queue(engine) {}

  std::shared_ptr<P2pMessage> send(uint32_t number, const Bytes& data) {
    const auto message = std::make_shared<P2pSend>(queue.group(), 1 - queue.rank(), key(number), plan());
    queue.send(message, makeSource(message->op, nullptr, {message->plan, data.data(), {}}));
    return message;
  }
  std::shared_ptr<P2pMessage> recv(uint32_t number, Bytes& data) {
    const auto message = std::make_shared<P2pRecv>(queue.group(), 1 - queue.rank(), key(number), plan());
    queue.recv(message, makeSink(message->op, nullptr, {message->plan, data.data()}));
    return message;
  }
  // The text of what `part` throws; empty where it throws nothing. Anything but PeerRefusal is named as such.
  static std::string error(const std::function<void()>& part) {
    try {
      part();
      return "";
    } catch (const PeerRefusal& refused) {
      return refused.what();
    } catch (const std::exception& other) {
      return std::string("not refused: ") + other.what();
    }
  }
  std::string ended(const std::shared_ptr<P2pMessage>& message) {
    return error([&] { queue.finish(*message); });
  }

  EngineQueue queue;

 private:
  static MessageKey key(uint32_t number) { return {{MessageFlow::Kind::channel, number}}; }
  MessagePlan plan() { return planP2p(kElements, CodecSpec{}, DType::float32, queue.group().chunk_bytes); }
};

// Messages both ways on all channels arrive.
void expectWhole(Side& side, const Bytes& data, uint32_t channels) {
  std::vector<std::shared_ptr<P2pMessage>> messages;
  std::vector<Bytes> got(channels, Bytes(data.size()));
  for (uint32_t k = 0; k < channels; ++k)
    messages.push_back(side.recv(numbered(k), got[k]));
  for (uint32_t k = 0; k < channels; ++k)
    messages.push_back(side.send(numbered(k), data));
  for (const auto& message : messages)
    ASSERT_EQ(side.ended(message), "");
  for (const Bytes& each : got)
    ASSERT_TRUE(each == data);
}

TEST(Withdrawal, BothSidesHearTheCauseAtOnceAndGoOn) {
  Ranks ranks(2);
  const Bytes data = randomTensor(DType::float32, kElements, 1);
  const auto start = std::chrono::steady_clock::now();
  std::promise<void> posted;
  together(ranks, [&](int rank, Engine& engine) {
    Side side(engine);
    Bytes got(data.size(), std::byte{0x55}), elsewhere(data.size());
    const uint32_t other = (kBlock + 1) * kBlockChannels;
    if (rank == 0) {
      const auto unanswered = side.send(numbered(1), data);  // rank 1 posts no receive of it
      posted.get_future().wait();
      side.queue.withdraw(1, kBlock, "stage 0 has failed");
      EXPECT_TRUE(holds(side.ended(unanswered), {"stage 0 has failed"}));
      EXPECT_EQ(side.ended(side.send(other, data)), "") << "another block";
    } else {
      const auto unsent = side.recv(numbered(0), got);  // rank 0 sends nothing there
      posted.set_value();
      EXPECT_TRUE(holds(side.ended(unsent), {"recv of channel 8192", "rank 0", "stage 0 has failed"}));
      EXPECT_TRUE(got == Bytes(data.size(), std::byte{0x55}));
      while (side.queue.withdrawn(0, kBlock).empty())  // the error frame may come before the word
        std::this_thread::yield();
      EXPECT_TRUE(holds(Side::error([&] { side.send(numbered(2), data); }), {"withdrawn: stage 0 has failed"}));
      EXPECT_TRUE(holds(Side::error([&] { side.recv(numbered(2), got); }), {"withdrawn: stage 0 has failed"}));
      EXPECT_EQ(side.ended(side.recv(other, elsewhere)), "");
    }
    EXPECT_EQ(side.queue.withdrawn(1 - rank, kBlock), "stage 0 has failed");
    side.queue.resume(1 - rank, kBlock);
    EXPECT_EQ(side.queue.withdrawn(1 - rank, kBlock), "");
    expectWhole(side, data, 3);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10)) << "half of the progress deadline";
}

// Whatever each side has sent and posted, in either order and up to any moment, what remains is answered, and the
// numbers of both sides agree afterwards.
TEST(Withdrawal, AnyMomentLeavesBothSidesAlike) {
  constexpr uint32_t kChannelsUsed = 4;
  const Bytes data = randomTensor(DType::float32, kElements, 1);
  Ranks ranks(2, [](int, GroupConfig& config) {
    config.connections = 2;
    config.flight_record = 256;
  });
  together(ranks, [&](int rank, Engine& engine) {
    Side side(engine);
    std::mt19937 random(17 + rank);
    for (int trial = 0; trial < 60; ++trial) {
      std::vector<std::shared_ptr<P2pMessage>> messages;
      std::vector<std::unique_ptr<Bytes>> got;
      const uint32_t steps = random() % 24;
      const bool finishes = random() % 2 == 0;
      bool refused = false;
      for (uint32_t step = 0; step < steps && !refused; ++step) {
        const uint32_t number = numbered(random() % kChannelsUsed);
        refused = !Side::error([&] {
                     if (random() % 2 == 0) {
                       messages.push_back(side.send(number, data));
                     } else {
                       got.push_back(std::make_unique<Bytes>(data.size()));
                       messages.push_back(side.recv(number, *got.back()));
                     }
                   }).empty();
      }
      const std::string why = "trial " + std::to_string(trial);
      if (rank == 0 || random() % 2 == 0) side.queue.withdraw(1 - rank, kBlock, why);
      if (finishes) {  // else they are dropped
        for (const auto& message : messages) {
          const std::string error = side.ended(message);
          // Perhaps rank 1 withdrew first, to begin anew.
          EXPECT_TRUE(error.empty() || error.find("withdrawn: ") != std::string::npos) << error;
        }
      }
      messages.clear();
      side.queue.resume(1 - rank, kBlock);
      expectWhole(side, data, kChannelsUsed);
    }
    const std::string record = engine.record().json();
    EXPECT_EQ(record.find("\"under way\""), std::string::npos) << record;
  });
}

// A rank that has begun anew, and failed again, before the other has begun: the other hears of it in its first message.
TEST(Withdrawal, OneSideMayFailAgainBeforeTheOtherHasBegun) {
  Ranks ranks(2);
  const Bytes data = randomTensor(DType::float32, kElements, 1);
  std::promise<void> again;
  together(ranks, [&](int rank, Engine& engine) {
    Side side(engine);
    expectWhole(side, data, 1);
    Bytes got(data.size());
    if (rank == 0) {
      side.queue.withdraw(1, kBlock, "the first failure");
      side.queue.resume(1, kBlock);
      const auto unsent = side.recv(numbered(0), got);
      side.queue.withdraw(1, kBlock, "the second failure");
      again.set_value();
      EXPECT_TRUE(holds(side.ended(unsent), {"the second failure"}));
    } else {
      again.get_future().wait();
      EXPECT_EQ(side.queue.withdrawn(0, kBlock), "the first failure");
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it is heard, and waits for this side
      side.queue.resume(0, kBlock);
      while (side.queue.withdrawn(0, kBlock).empty())
        std::this_thread::yield();  // or it was late
      EXPECT_TRUE(holds(Side::error([&] { side.send(numbered(0), data); }), {"the second failure"}));
    }
    side.queue.resume(1 - rank, kBlock);
    expectWhole(side, data, 1);
  });
}

// The peer that does not withdraw is a fault as any other.
TEST(Withdrawal, APeerThatIsGoneIsNamed) {
  Ranks ranks(2);
  EngineQueue queue(ranks.engine(0));
  queue.withdraw(1, kBlock, "a failure");
  ranks.hub().kill(1);
  const std::string error = Side::error([&] { queue.resume(1, kBlock); });
  EXPECT_TRUE(holds(error, {"not refused", "resume block 2", "rank 1"}));
}

TEST(Withdrawal, WhatIsNoWithdrawalIsRefused) {
  const Withdrawal told{3, 2, "line\nend \\"};
  const Withdrawal heard = Withdrawal::parse(told.text());
  EXPECT_EQ(heard.block, 3u);
  EXPECT_EQ(heard.period, 2u);
  EXPECT_EQ(heard.why, told.why);
  for (const std::string& text :
       {"withdrawn=512\nperiod=0\nwhy=\n", "withdrawn=x\nperiod=0\nwhy=\n", "withdrawn=1\nwhy=\n",
        "withdrawn=1\nperiod=-1\nwhy=\n", "flow=channel 1\nframes=1\n"})
    EXPECT_THROW(Withdrawal::parse(text), WireError) << text;
}

}  // namespace
}  // namespace lowcomm
