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

// Where sends of the bulk lane are, and how often somebody waited for one that was on its way.
struct Network {
  enum class Sends { far, arrived, lost };
  std::atomic<Sends> sends{Sends::far};
  std::atomic<int> waits{0};
};

// A network so far away that a send of the bulk lane is over only once somebody waits for that.
class FarTransport final : public ForwardingTransport {
 public:
  FarTransport(std::unique_ptr<Transport> inner, Network& network)
      : ForwardingTransport(std::move(inner)), network_(network) {}

  std::unique_ptr<Transfer> isend(Lane lane, int peer, uint32_t tag, std::span<const std::byte> data) override {
    auto sent = ForwardingTransport::isend(lane, peer, tag, data);
    if (lane == Lane::control) return sent;
    return std::make_unique<Far>(std::move(sent), peer, network_);
  }

 private:
  class Far final : public Transfer {
   public:
    Far(std::unique_ptr<Transfer> sent, int peer, Network& network)
        : sent_(std::move(sent)), peer_(peer), network_(network) {}
    void wait(milliseconds deadline) override {
      using Kind = TransportError::Kind;
      if (network_.sends == Network::Sends::lost) throw TransportError(Kind::closed, peer_, "lost");
      if (network_.sends == Network::Sends::far && !is_over_) {
        if (deadline.count() == 0) throw TransportError(Kind::timed_out, peer_, "far away");
        ++network_.waits;
        is_over_ = true;
      }
      sent_->wait(deadline);
    }

   private:
    const std::unique_ptr<Transfer> sent_;
    const int peer_;
    Network& network_;
    bool is_over_ = false;
  };

  Network& network_;
};

class SmallSend : public ::testing::Test {
 protected:
  // Sends `elements` float32 from rank 0 to rank 1, and expects them there. Returns how often the send waited until a
  // frame had arrived.
  int waitsOfASend(uint64_t elements) {
    const int before = network.waits;
    const Tensor sent = Tensor::random(elements, 3, "none");
    Tensor got = sent.empty();
    const MessagePtr receive = receiving(ranks->engine(1), got, 0);
    expectFinish(ranks->engine(0), sending(ranks->engine(0), sent, 1));
    const int waited = network.waits - before;
    expectFinish(ranks->engine(1), receive);
    EXPECT_TRUE(got.data == sent.data);
    return waited;
  }

  // Elements of a message that leaves, with its frames' headers, and of one that is too long for that.
  static constexpr uint64_t kSmall = 64 << 10, kLarge = 72 << 10;
  MemoryHub hub{2};
  Network network;
  std::unique_ptr<Ranks> ranks = std::make_unique<Ranks>(
      2, nullptr, [this](int rank) { return std::make_unique<FarTransport>(hub.transport(rank), network); });
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
}

// They count with the pages that they take, and their buffers go back to the pool.
TEST_F(SmallSend, SmallOnesAreCountedByTheirMemory) {
  const size_t most = P2p::kMostLeaving / 4096;
  size_t sends = 0;
  while (waitsOfASend(1) == 0)
    ++sends;
  EXPECT_EQ(sends, most);
  BufferPool& pool = ranks->engine(0).group().frames;
  const size_t held = pool.held();
  for (int round = 0; round < 3; ++round) {
    network.sends = Network::Sends::arrived;
    for (size_t i = 0; i < most; ++i)
      EXPECT_EQ(waitsOfASend(1), 0);
  }
  EXPECT_LE(pool.held(), held);
}

TEST_F(SmallSend, HasArrivedWhenItsGroupIsShutDown) {
  EXPECT_EQ(waitsOfASend(100), 0);
  EXPECT_FALSE(ranks->engine(0).awaitArrivals(milliseconds(0)));
  EXPECT_EQ(ranks->engine(0).messages().flush(milliseconds(0)), std::vector<int>{1});
  EXPECT_GT(waitsOfASend(100), 0) << "the group is about to end";
  ranks->engine(0).shutdown();
  EXPECT_EQ(ranks->engine(0).messages().flush(milliseconds(0)), std::vector<int>{});
}

TEST_F(SmallSend, ThatIsLostByThenFails) {
  const Tensor sent = Tensor::random(100, 3, "none");
  Tensor got = sent.empty();
  const MessagePtr receive = receiving(ranks->engine(1), got, 0), send = sending(ranks->engine(0), sent, 1);
  network.sends = Network::Sends::lost;
  const Outcome outcome = finish(ranks->engine(0), send);
  EXPECT_TRUE(outcome.is<PeerError>() && holds(outcome.what(), {"send with tag 0", "rank 1", "lost"}))
      << outcome.what();
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
