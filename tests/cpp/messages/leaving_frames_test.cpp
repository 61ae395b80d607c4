// Ops and sends that end once their frames are on their way (LeavingFrames).
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "collective/collectives.h"
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

class Leaving : public ::testing::Test {
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

  // Runs an op of `n` elements on both ranks, of which rank 1 is the root, and returns the waits until a frame had
  // arrived.
  int waitsOfAnOp(const std::string& name, uint64_t n) {
    const int before = network.waits;
    std::vector<Bytes> data(2);
    for (int rank : {0, 1})
      data[rank] = randomTensor(DType::float32, n, rank);
    ranks->expectRun(name, [&](int rank, OpContext& op) {
      if (name == "barrier") return barrier(op);
      if (name == "broadcast") return broadcast(op, {{n, {}, DType::float32, data[rank].data()}}, 1);
      std::vector<Bytes> outputs(2, Bytes(4 * n));
      allGather(op, {{{single(n, "none")}, DType::float32, data[rank].data(), {outputs[0].data(), outputs[1].data()}}});
      EXPECT_TRUE(outputs == data);
    });
    if (name == "broadcast") EXPECT_TRUE(data[0] == data[1]);
    return network.waits - before;
  }

  static constexpr uint64_t kFrame = kMinChunkBytes / 4;  // elements of a full one; 12 may be on their way
  MemoryHub hub{2};
  Network network;
  std::unique_ptr<Ranks> ranks = std::make_unique<Ranks>(
      2, nullptr, [this](int rank) { return std::make_unique<FarTransport>(hub.transport(rank), network); });
};

TEST_F(Leaving, SendEndsBeforeItHasArrived) {
  EXPECT_EQ(waitsOfASend(1), 0);
  EXPECT_EQ(waitsOfASend(kFrame), 0);
}

TEST_F(Leaving, LargeSendWaitsForItsFirstFramesOnly) {
  const int waits = waitsOfASend(40 * kFrame);
  EXPECT_GT(waits, 20);
  EXPECT_LT(waits, 40);
}

TEST_F(Leaving, OpsEndBeforeTheirFramesHaveArrived) {
  for (const char* op : {"barrier", "broadcast", "all_gather"})
    EXPECT_EQ(waitsOfAnOp(op, 100), 0) << op;
  EXPECT_EQ(ranks->engine(0).group().leaving.flush(milliseconds(0)), std::vector<int>{1});
  EXPECT_GT(waitsOfAnOp("barrier", 0), 0) << "the group is about to end";
}

TEST_F(Leaving, LargeOpWaitsForItsFirstFramesOnly) {
  const int waits = waitsOfAnOp("all_gather", 40 * kFrame);
  EXPECT_GT(waits, 2 * 20);
  EXPECT_LT(waits, 2 * 40);
}

TEST_F(Leaving, SendWaitsWhereManyAreOnTheirWay) {
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(waitsOfASend(4 * kFrame), 0) << i;
  EXPECT_GT(waitsOfASend(4 * kFrame), 0);
}

// They count with the pages that they take, and their buffers go back to the pool.
TEST_F(Leaving, SmallFramesAreCountedByTheirMemory) {
  const size_t most = LeavingFrames::kMost / 4096;
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

TEST_F(Leaving, SendHasArrivedWhenItsGroupIsShutDown) {
  EXPECT_EQ(waitsOfASend(100), 0);
  EXPECT_FALSE(ranks->engine(0).awaitArrivals(milliseconds(0)));
  EXPECT_EQ(ranks->engine(0).group().leaving.flush(milliseconds(0)), std::vector<int>{1});
  EXPECT_GT(waitsOfASend(100), 0) << "the group is about to end";
  ranks->engine(0).shutdown();
  EXPECT_EQ(ranks->engine(0).group().leaving.flush(milliseconds(0)), std::vector<int>{});
}

TEST_F(Leaving, SendThatIsLostByThenFails) {
  const Tensor sent = Tensor::random(100, 3, "none");
  Tensor got = sent.empty();
  const MessagePtr receive = receiving(ranks->engine(1), got, 0), send = sending(ranks->engine(0), sent, 1);
  network.sends = Network::Sends::lost;
  const Outcome outcome = finish(ranks->engine(0), send);
  EXPECT_TRUE(outcome.is<PeerError>() && holds(outcome.what(), {"send with tag 0", "rank 1", "lost"}))
      << outcome.what();
}

// Both ranks are told, as of a large one.
TEST_F(Leaving, SendOfAnotherMessageThanTheReceiverExpects) {
  const Tensor sent = Tensor::random(100, 3, "none");
  Tensor got = Tensor::random(101, 3, "none");
  const MessagePtr receive = receiving(ranks->engine(1), got, 0), send = sending(ranks->engine(0), sent, 1);
  for (const Outcome& outcome : {finish(ranks->engine(0), send), finish(ranks->engine(1), receive)}) {
    EXPECT_TRUE(outcome.is<PeerRefusal>()) << outcome.what();
    EXPECT_TRUE(holds(outcome.what(), {"elements", "100", "101"})) << outcome.what();
  }
}

// The first frame of more than 1,000 bytes takes so long, the second one twice as long.
class LateTransport final : public ForwardingTransport {
 public:
  LateTransport(std::unique_ptr<Transport> inner, milliseconds time)
      : ForwardingTransport(std::move(inner)), time_(time) {}

  std::unique_ptr<Transfer> isend(Lane lane, int peer, uint32_t tag, std::span<const std::byte> data) override {
    if (data.size() <= 1000) return ForwardingTransport::isend(lane, peer, tag, data);
    const milliseconds late = time_ * ++sends_;
    return std::make_unique<Late>(std::async(std::launch::async, [=, this] {
      std::this_thread::sleep_for(late);
      ForwardingTransport::isend(lane, peer, tag, data)->wait(milliseconds(10'000));
    }));
  }

 private:
  struct Late final : Transfer {
    explicit Late(std::shared_future<void> sent) : sent(std::move(sent)) {}
    void wait(milliseconds deadline) override {
      if (sent.wait_for(deadline) == std::future_status::ready) return sent.get();
      throw TransportError(TransportError::Kind::timed_out, 0, "late");
    }
    std::shared_future<void> sent;
  };
  const milliseconds time_;
  int sends_ = 0;
};

class LeavingLate : public ::testing::Test {
 protected:
  // Both ranks take part in a broadcast of `n` elements from rank 1, whose frames take `time` each.
  void broadcastLate(uint64_t n, milliseconds time) {
    ranks = std::make_unique<Ranks>(
        2, nullptr, [&](int rank) { return std::make_unique<LateTransport>(hub.transport(rank), time); });
    data = {Bytes(4 * n), randomTensor(DType::float32, n, 1)};
    start("broadcast",
          [this, n](int rank, OpContext& op) { broadcast(op, {{n, {}, DType::float32, data[rank].data()}}, 1); });
  }
  void start(const char* name, const Ranks::Job& job) {
    for (int rank : {0, 1})
      pending.push_back(ranks->start(rank, name, job));
  }
  void expectFinish() {
    for (const Outcome& outcome : ranks->finish(std::move(pending)))
      EXPECT_TRUE(outcome.ok()) << outcome.what();
    EXPECT_TRUE(data[0] == data[1]);
  }

  MemoryHub hub{2};
  std::vector<Bytes> data;
  std::unique_ptr<Ranks> ranks;
  std::vector<std::future<Outcome>> pending;
};

// The root is in the next op, and a rank that still waits for its frames does not take it for one in another op.
TEST_F(LeavingLate, RootIsAheadOfARankThatWaits) {
  broadcastLate(1000, milliseconds(2500));
  start("barrier", [](int, OpContext& op) { barrier(op); });
  EXPECT_EQ(pending[1].wait_for(milliseconds(2000)), std::future_status::ready) << "the root has not left its frames";
  expectFinish();
}

// All frames together take longer than the patience, each of them after the one before does not.
TEST_F(LeavingLate, EndOfAGroupWaitsWhileFramesArrive) {
  broadcastLate(6 * kMinChunkBytes / 4, milliseconds(500));
  pending[1].wait();
  EXPECT_EQ(ranks->engine(1).group().leaving.flush(milliseconds(2000)), std::vector<int>{});
  expectFinish();
}

}  // namespace
}  // namespace lowcomm
