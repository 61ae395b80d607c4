// Sends that end once their frames are on their way (P2p::finish).
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "forwarding_transport.h"
#include "p2p_cases.h"

namespace lowcomm {
namespace {

using namespace test;
using std::chrono::milliseconds;

// A network so far away that a send of the bulk lane is over only once somebody waits for that.
class FarTransport final : public ForwardingTransport {
 public:
  FarTransport(std::unique_ptr<Transport> inner, std::atomic<int>& waits)
      : ForwardingTransport(std::move(inner)), waits_(waits) {}

  std::unique_ptr<Transfer> isend(Lane lane, int peer, uint32_t tag, std::span<const std::byte> data) override {
    auto sent = ForwardingTransport::isend(lane, peer, tag, data);
    if (lane == Lane::control) return sent;
    return std::make_unique<Far>(std::move(sent), peer, waits_);
  }

 private:
  class Far final : public Transfer {
   public:
    Far(std::unique_ptr<Transfer> sent, int peer, std::atomic<int>& waits)
        : sent_(std::move(sent)), peer_(peer), waits_(waits) {}
    void wait(milliseconds deadline) override {
      if (deadline.count() == 0 && !is_over_) throw TransportError(TransportError::Kind::timed_out, peer_, "far away");
      if (!std::exchange(is_over_, true)) ++waits_;
      sent_->wait(deadline);
    }

   private:
    const std::unique_ptr<Transfer> sent_;
    const int peer_;
    std::atomic<int>& waits_;
    bool is_over_ = false;
  };

  std::atomic<int>& waits_;
};

class SmallSend : public ::testing::Test {
 protected:
  // Sends `elements` float32 from rank 0 to rank 1, and expects them there. Returns how often the send waited until a
  // frame had arrived.
  int waitsOfASend(uint64_t elements) {
    const int before = waits;
    const Tensor sent = Tensor::random(elements, 3, "none");
    Tensor got = sent.empty();
    const MessagePtr receive = receiving(ranks->engine(1), got, 0);
    expectFinish(ranks->engine(0), sending(ranks->engine(0), sent, 1));
    const int waited = waits - before;
    expectFinish(ranks->engine(1), receive);
    EXPECT_TRUE(got.data == sent.data);
    return waited;
  }

  static constexpr uint64_t kSmall = P2p::kLeavingBytes / 4 - 1000, kLarge = P2p::kLeavingBytes / 4;
  MemoryHub hub{2};
  std::atomic<int> waits{0};
  std::unique_ptr<Ranks> ranks = std::make_unique<Ranks>(
      2, nullptr, [this](int rank) { return std::make_unique<FarTransport>(hub.transport(rank), waits); });
};

TEST_F(SmallSend, EndsBeforeItHasArrived) {
  EXPECT_EQ(waitsOfASend(1), 0);
  EXPECT_EQ(waitsOfASend(kSmall), 0);
  EXPECT_GT(waitsOfASend(kLarge), 0);
}

TEST_F(SmallSend, WaitsWhereManyAreOnTheirWay) {
  for (int i = 0; i < 4; ++i)
    EXPECT_EQ(waitsOfASend(kSmall), 0) << i;
  EXPECT_GT(waitsOfASend(kSmall), 0);
  ranks->engine(0).messages().flush(milliseconds(1000));
  EXPECT_EQ(waitsOfASend(kSmall), 0) << "none is on its way any more";
}

TEST_F(SmallSend, HasArrivedWhenItsGroupIsShutDown) {
  EXPECT_EQ(waitsOfASend(100), 0);
  ranks->engine(0).shutdown();
  EXPECT_EQ(waits, 1);
}

// Both ranks are told, as of a large one.
TEST_F(SmallSend, OfAnotherMessageThanTheReceiverExpects) {
  const Tensor sent = Tensor::random(100, 3, "none");
  Tensor got = Tensor::random(101, 3, "none");
  const MessagePtr receive = receiving(ranks->engine(1), got, 0), send = sending(ranks->engine(0), sent, 1);
  for (const Outcome& outcome : {finish(ranks->engine(0), send), finish(ranks->engine(1), receive)}) {
    EXPECT_TRUE(outcome.is<PeerRefusal>()) << outcome.what();
    EXPECT_TRUE(holds(outcome.what(), {"elements", "100", "101"})) << outcome.what();
  }
}

}  // namespace
}  // namespace lowcomm
