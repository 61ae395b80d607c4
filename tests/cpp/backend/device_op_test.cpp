// Own ops of CUDA tensors whose values are copied: what a device is told, in which order, and by which threads. A group
// of one rank, on a fake device.
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <memory>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "backend/backend.h"
#include "errors.h"
#include "fake_device.h"
#include "tensor/compression.h"

namespace lowcomm {
namespace {

using namespace fake_device;
using namespace std::chrono_literals;
using Told = std::vector<std::string>;

struct Ended final : c10d::Work {
  Ended() { finish(); }
};

// Stands for NCCL, which a group of one rank hands what no policy names. Writes 9 into what it receives.
struct Silent final : c10d::Backend {
  Silent() : c10d::Backend(0, 1) {}
  const std::string getBackendName() const override { return "silent"; }
  void setTimeout(std::chrono::milliseconds) override {}
  WorkPtr send(Tensors& tensors, int, int) override { return handed(tensors, /*written=*/false); }
  WorkPtr recv(Tensors& tensors, int, int) override { return handed(tensors, /*written=*/true); }
  WorkPtr recvAnysource(Tensors& tensors, int) override { return handed(tensors, /*written=*/true); }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions&) override {
    return handed(tensors, /*written=*/true);
  }

  WorkPtr handed(Tensors& tensors, bool written) {
    for (at::Tensor& tensor : tensors) {
      EXPECT_FALSE(tensor.device().is_cpu());
      got.push_back(tensor);
      if (written) tensor.fill_(9);
    }
    return c10::make_intrusive<Ended>();
  }

  Tensors got;
};

class DeviceOpTest : public testing::Test {
 protected:
  void SetUp() override { reset(); }

  void open(std::optional<bool> nccl = std::nullopt) {
    auto options = c10::make_intrusive<Options>();
    options->timeout = 30s;
    options->group_name = "devices";
    options->global_ranks_in_group = {0};
    options->nccl = nccl;
    const MakeNccl nccl_or_none = [this](const StorePtr&, int, int, const c10::intrusive_ptr<Options>& of) {
      ++asked_;
      EXPECT_EQ(of->group_name, "devices");
      return has_nccl_ ? BackendPtr(nccl_ = c10::make_intrusive<Silent>()) : BackendPtr();
    };
    backend_ = LowcommBackend::create(c10::make_intrusive<c10d::HashStore>(), 0, 1, std::move(options), nccl_or_none);
  }

  WorkPtr gather(const at::Tensor& output, const at::Tensor& input) {
    at::Tensor to = output, from = input;
    return backend_->_allgather_base(to, from, {});
  }

  // The worker stands until the promise is kept.
  std::promise<void> standStill() {
    std::promise<void> go;
    backend_->parts().issuer.submitJob(
        "stands", 1, [until = go.get_future().share()](OpContext&) { until.wait(); },
        [](std::exception_ptr, const OpCounters&) {});
    return go;
  }

  static int64_t count(const std::string& order) { return std::count(told.begin(), told.end(), order); }

  int asked_ = 0;
  bool has_nccl_ = false;
  c10::intrusive_ptr<Silent> nccl_;  // the one made last
  c10::intrusive_ptr<LowcommBackend> backend_;
};

TEST_F(DeviceOpTest, EndsWhenItsCopiesHaveLanded) {
  open();
  const at::Tensor x = onDevice({1, 2, 3}), y = onDevice({0, 0, 0});
  auto work = gather(y, x);
  EXPECT_TRUE(work->wait(kNoTimeout));
  EXPECT_EQ(elementsOf(y), (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(Told(told.begin(), told.begin() + 8),
            (Told{"record e1 on 0:5", "block 0:8 on e1", "copy to host on 0:8", "record e2 on 0:8", "synchronize e2",
                  "copy to device on 0:7", "record e3 on 0:7", "synchronize e3"}));
}

// The link is not idle while the next op's values cross to the host. On a stream of their own: they wait for what the
// caller computes first, and what the ops before have to copy out does not.
TEST_F(DeviceOpTest, CopiesInWhileTheOpsBeforeAreUnderWay) {
  open();
  const at::Tensor x = onDevice({1, 2}), y = onDevice({0, 0}), v = onDevice({3, 4}), w = onDevice({0, 0});
  auto go = standStill();
  auto first = gather(y, x), second = gather(w, v);
  EXPECT_EQ(told, (Told{"record e1 on 0:5", "block 0:8 on e1", "copy to host on 0:8", "record e2 on 0:8",
                        "record e3 on 0:5", "block 0:8 on e3", "copy to host on 0:8", "record e4 on 0:8"}));
  go.set_value();
  EXPECT_TRUE(second->wait(kNoTimeout));
  EXPECT_EQ(elementsOf(y), (std::vector<float>{1, 2}));
  EXPECT_EQ(elementsOf(w), (std::vector<float>{3, 4}));
}

TEST_F(DeviceOpTest, CopiesInWhatAnOpBeforeWritesWhenThatHasEnded) {
  open();
  const at::Tensor x = onDevice({1, 2}), y = onDevice({0, 0}), z = onDevice({0, 0});
  auto go = standStill();
  const at::Tensor alias =
      at::for_blob(y.mutable_data_ptr(), {2}).options(y.options()).target_device(y.device()).make_tensor();
  auto first = gather(y, x), second = gather(z, alias);
  EXPECT_EQ(told, (Told{"record e1 on 0:5", "block 0:8 on e1", "copy to host on 0:8", "record e2 on 0:8",
                        "record e3 on 0:5"}));
  go.set_value();
  EXPECT_TRUE(second->wait(kNoTimeout));
  EXPECT_EQ(elementsOf(z), (std::vector<float>{1, 2}));
}

// What the caller enqueued before may still use the output: without copies in, no wait for these orders the copy out.
TEST_F(DeviceOpTest, AnOutputAloneIsWrittenBehindTheCallersWork) {
  open();
  OpIssuer& issuer = backend_->parts().issuer;
  const at::Tensor y = onDevice({0});
  DeviceQueue* queue = issuer.queueOf("broadcast", y);
  auto buffers = std::make_shared<OpBuffers>();
  buffers->enter(queue);
  auto* to = static_cast<float*>(buffers->target(y));
  buffers->run = [to](OpContext&) { *to = 4; };
  const OpIssuer::Op op{c10d::OpType::BROADCAST, "broadcast", ++backend_->parts().group.sequence, /*exact=*/true};
  EXPECT_TRUE(issuer.submit(op, {y}, {y}, queue, buffers)->wait(kNoTimeout));
  EXPECT_EQ(elementsOf(y), std::vector<float>{4});
  EXPECT_EQ(Told(told.begin(), told.begin() + 5), (Told{"record e1 on 0:5", "block 0:7 on e1", "copy to device on 0:7",
                                                        "record e2 on 0:7", "synchronize e2"}));
}

// The memory of a tensor that is gone is not another's while a copy reads it; nor is the failure late.
TEST_F(DeviceOpTest, LeavesMemoryToTheCopiesOfAnOpThatFails) {
  open();
  auto go = standStill();
  auto work = gather(onDevice({0}), onDevice({1}));
  backend_->abort();
  go.set_value();
  EXPECT_ANY_THROW(work->wait(kNoTimeout));
  EXPECT_EQ(count("keep for 0:8"), 1);
  EXPECT_EQ(count("synchronize e2"), 0);
}

// A thread whose device is 0 opens a context there: each rank of a host would, on the same GPU.
TEST_F(DeviceOpTest, OpensNoContextOnAnotherDevice) {
  open();
  current = 1;
  auto work = gather(onDevice({0}, 1), onDevice({5}, 1));
  std::promise<void> called;
  auto callback = work->getFuture()->then(
      [&](c10::ivalue::Future&) {
        called.set_value();
        return c10::IValue(1);
      },
      c10::IntType::get());
  EXPECT_TRUE(work->wait(kNoTimeout));
  EXPECT_EQ(called.get_future().wait_for(30s), std::future_status::ready);
  callback->wait();
  backend_->shutdown();
  EXPECT_EQ(contexts(), (std::set<c10::DeviceIndex>{1}));
}

TEST_F(DeviceOpTest, SeveralTensorsTakeOneCopyInEitherDirection) {
  open();
  const Tensors tensors = {onDevice({1, 2}).view({1, 2}), onDevice({3, 4, 5}), onDevice({6})};
  std::vector<std::shared_ptr<Compression>> states;
  for (const auto& tensor : tensors)
    states.push_back(std::make_shared<Compression>(tensor.sizes(), 0, /*feedback=*/false, /*eight_bits=*/false, 1));
  told.clear();
  const CodecSpec codec = CodecSpec::parse("fp16:nonfinite=poison");
  auto work = backend_->allReduceLowRank(tensors, c10d::ReduceOp(c10d::ReduceOp::SUM), codec, codec, states, {0, 2, 4},
                                         {0, 1, 2}, 0);
  EXPECT_TRUE(work->wait(kNoTimeout));
  EXPECT_EQ(count("copy to host on 0:8"), 1);
  EXPECT_EQ(count("copy to device on 0:7"), 1);
  EXPECT_EQ(elementsOf(tensors[0]), (std::vector<float>{1, 2}));
  EXPECT_EQ(elementsOf(tensors[1]), (std::vector<float>{3, 4, 5}));
  EXPECT_EQ(elementsOf(tensors[2]), (std::vector<float>{6}));
  const auto counted = backend_->group().stats.snapshot().at("all_reduce");
  EXPECT_EQ(counted.device_to_host_bytes, 6 * sizeof(float));
  EXPECT_EQ(counted.host_to_device_bytes, 6 * sizeof(float));
}

TEST_F(DeviceOpTest, IsNotCaptured) {
  open();
  const uint64_t before = backend_->getSequenceNumberForGroup();
  at::Tensor x = onDevice({1});
  capturing = true;
  EXPECT_TRUE(test::holds(test::thrownBy<c10::ValueError>([&] { gather(onDevice({0}), x); }),
                          {"all_gather on group devices: expected a stream that runs"}));
  Tensors tensors = {x};
  EXPECT_THROW(backend_->allreduce(tensors, {}), c10::ValueError);
  capturing = false;
  EXPECT_EQ(told, Told{});
  EXPECT_EQ(backend_->getSequenceNumberForGroup(), before);
}

TEST_F(DeviceOpTest, NcclIsAskedForOnlyByItsOption) {
  has_nccl_ = true;
  for (const std::optional<bool> nccl : {std::optional<bool>(), std::optional(false)}) {
    open(nccl);
    EXPECT_TRUE(gather(onDevice({0}), onDevice({1}))->wait(kNoTimeout));
    EXPECT_FALSE(backend_->supportsTensorAlloc(0));
  }
  EXPECT_EQ(asked_, 0);
}

// A policy takes the ops that it names away from NCCL.
TEST_F(DeviceOpTest, NcclGetsExactOpsAndMessages) {
  has_nccl_ = true;
  open(true);
  Tensors both{onDevice({1}), onDevice({2, 3})};
  WorkPtr work = backend_->allreduce_coalesced(both, {});
  EXPECT_TRUE(work->wait(kNoTimeout));
  EXPECT_EQ(nccl_->got.size(), 2u);
  for (const bool any : {false, true}) {
    Tensors received{onDevice({3, 4})};
    work = any ? backend_->recvAnysource(received, 1) : backend_->recv(received, 0, 1);
    EXPECT_EQ(work->result().at(0).data_ptr(), received[0].data_ptr());
    EXPECT_TRUE(work->wait(kNoTimeout));
    EXPECT_EQ(nccl_->got.back().data_ptr(), received[0].data_ptr());
  }
  EXPECT_EQ(count("copy to host on 0:7") + count("copy to host on 0:8"), 0);
}

TEST_F(DeviceOpTest, NcclTrueNeedsIt) {
  EXPECT_THROW(open(true), c10::ValueError);
  has_nccl_ = true;
  open(true);
  EXPECT_EQ(asked_, 2);
}

}  // namespace
}  // namespace lowcomm
