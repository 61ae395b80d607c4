// An outer loop whose state is where the parameters are: on a simulated CUDA device, and next to ranks of the host.
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "base/error.h"
#include "diloco_ranks.h"
#include "fake_device.h"
#include "host_device_codec.h"

namespace lowcomm {
namespace {

using test::coded;
using test::kShapes;
using test::onRanks;
using test::options;
using test::Ranks;
using test::Trainee;

std::unique_ptr<CodecKernels> promptKernels() {
  return std::make_unique<test::LateKernels>(test::LateDevice::prompt());
}

struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = c10::GetCPUAllocator()->raw_allocate(bytes);
    return {memory, memory, [](void* p) { c10::GetCPUAllocator()->raw_deallocate(p); },
            c10::Device(fake_device::kType, fake_device::current)};
  }
  void copy_data(void*, const void*, std::size_t) const override {}
};

class DiLoCoXOnADevice : public testing::Test {
 protected:
  void SetUp() override {
    static HostMemory memory;
    c10::SetAllocator(fake_device::kType, &memory);
    fake_device::reset();
    setCodecKernels(promptKernels);
  }
  void TearDown() override { setCodecKernels(nullptr); }
};

enum class Where { host, host_state, device };

at::Tensor onDevice(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options().device(c10::Device(fake_device::kType, 0))).copy_(tensor);
}

// A rank's model in that dtype, and its loop.
struct Rank : Trainee {
  Rank(int rank, const std::shared_ptr<OpQueue>& queue, DiLoCoXOptions o, Where where, at::ScalarType type)
      : Trainee(rank, kShapes) {
    for (OuterParameter& p : parameters) {
      p.tensor = p.tensor.to(type);
      if (where == Where::device) p.tensor = onDevice(p.tensor);
    }
    o.on_device = where != Where::host;
    loop = std::make_unique<DiLoCoX>(parameters, queue, o);
  }

  // Inner steps by values that come from the host; the last parameter takes no part for a time.
  void train(int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      for (size_t i = 0; i + (step < 5) < parameters.size(); ++i) {
        at::Tensor& x = parameters[i].tensor;
        const at::Tensor own = x.cpu().to(at::kFloat);
        x.copy_(own -
                ((own - noise(own.sizes(), 7 * i + rank)) * 0.02 + noise(own.sizes(), 1000 * step + rank) * 0.01));
      }
      loop->step(1 + rank);
    }
  }

  std::vector<at::Tensor> ended() {
    std::vector<at::Tensor> all;
    for (const auto& p : parameters)
      all.push_back(p.tensor.cpu().clone());
    for (const at::Tensor& outer : outer())
      all.push_back(outer.cpu());
    for (const auto& [key, tensor] : loop->state())
      all.push_back(tensor);
    return all;
  }
};

struct Case {
  const char* name;
  DiLoCoXOptions options;
  at::ScalarType type = at::kFloat;
};

std::vector<Case> cases() {
  DiLoCoXOptions streaming = coded(options(6, OuterMode::restart), "sym4:bucket=64");
  streaming.fragments = 3;
  streaming.delay = 2;
  streaming.alpha = 0.25;
  DiLoCoXOptions mixed = coded(options(3, OuterMode::restart), "gauss2", 0, false);
  mixed.alpha = 0.5;
  mixed.momentum = 0;
  DiLoCoXOptions clock = coded(options(3, OuterMode::proceed), "qsgd4:bucket=64");
  clock.sync_seconds = 1000;
  return {{"continue", coded(options(3, OuterMode::proceed), "sym4:bucket=64")},
          {"sync", coded(options(3, OuterMode::sync), "gauss2")},
          {"sync, exact", options(3, OuterMode::sync)},
          {"restart", coded(options(3, OuterMode::restart), "topk:keep=0.1,values=mid2")},
          {"streaming", streaming},
          {"mixed", mixed},
          {"samples", clock},
          {"exact", options(3, OuterMode::proceed)},
          {"bfloat16", coded(options(3, OuterMode::proceed), "sym4:bucket=64"), at::kBFloat16}};
}

void expectEqual(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_TRUE(at::equal(a[i], b[i])) << what << ", tensor " << i;
}

TEST_F(DiLoCoXOnADevice, HasTheHostsBits) {
  for (const Case& c : cases()) {
    for (int size : {1, 2, 3}) {
      std::vector<std::vector<at::Tensor>> expected(size), got(size);
      // All on the host; then ranks that keep their state on the device, or where the host's parameters are.
      for (bool placed : {false, true}) {
        Ranks ranks(size);
        onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
          const Where where = !placed ? Where::host : rank == 1 ? Where::host_state : Where::device;
          Rank trainee(rank, queue, c.options, where, c.type);
          trainee.train(0, 11);
          (placed ? got : expected)[rank] = trainee.ended();
        });
      }
      for (int rank = 0; rank < size; ++rank)
        expectEqual(got[rank], expected[rank], std::string(c.name) + ", rank " + std::to_string(rank));
    }
  }
}

// The host's copy of what a checkpoint holds is loaded by either.
TEST_F(DiLoCoXOnADevice, GoesOnFromTheOthersState) {
  for (const Case& c : cases()) {
    for (bool to_device : {false, true}) {
      std::vector<std::vector<at::Tensor>> whole(2), resumed(2);
      Ranks ranks(2), again(2);
      std::vector<TensorMap> states(2);
      std::vector<std::vector<at::Tensor>> parameters(2);
      const Where first = to_device ? Where::host : Where::device, then = to_device ? Where::device : Where::host;
      onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
        Rank trainee(rank, queue, c.options, first, c.type);
        trainee.train(0, 7);
        states[rank] = trainee.loop->state();
        for (const auto& p : trainee.parameters)
          parameters[rank].push_back(p.tensor.cpu().clone());
        trainee.train(7, 12);
        whole[rank] = trainee.ended();
      });
      onRanks(again, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
        Rank trainee(rank, queue, c.options, then, c.type);
        for (size_t i = 0; i < kShapes.size(); ++i)
          trainee.parameters[i].tensor.copy_(parameters[rank][i]);
        trainee.loop->load(states[rank]);
        trainee.train(7, 12);
        resumed[rank] = trainee.ended();
      });
      for (int rank = 0; rank < 2; ++rank)
        expectEqual(resumed[rank], whole[rank],
                    std::string(c.name) + (to_device ? ", to the device" : ", to the host"));
    }
  }
}

// A rank that comes late takes the state of one on the device, and the other way round.
TEST_F(DiLoCoXOnADevice, IsTakenOver) {
  for (int late : {0, 1}) {
    std::vector<std::vector<at::Tensor>> outer(2);
    Ranks ranks(2);
    onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
      const auto o = coded(options(3, OuterMode::proceed), "sym4:bucket=64");
      Ranks alone(1);
      Rank trainee(rank, nullptr, o, rank == 0 ? Where::device : Where::host, at::kFloat);
      trainee.loop->regroup({std::make_shared<EngineQueue>(alone.engine(0))});
      if (rank != late) trainee.train(0, 7);
      trainee.loop->quiesce();
      trainee.loop->regroup({queue});
      EXPECT_GE(trainee.loop->steps(), 7);
      EXPECT_LT(trainee.loop->steps(), 10) << "an outer step comes first";
      while (trainee.loop->steps() < 13)
        trainee.train(trainee.loop->steps(), trainee.loop->steps() + 1);
      trainee.loop->finish();
      for (const at::Tensor& one : trainee.outer())
        outer[rank].push_back(one.cpu());
    });
    expectEqual(outer[0], outer[1], "late " + std::to_string(late));
  }
}

// A pseudo-gradient of −0 is something that is sent, with the residual, and one of +0 is not: on either.
TEST_F(DiLoCoXOnADevice, TakesMinusZeroAsTheHostDoes) {
  for (const float outer : {-0.0f, 0.0f}) {
    std::vector<std::vector<at::Tensor>> expected(2), got(2);
    for (bool placed : {false, true}) {
      Ranks ranks(2);
      onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
        Rank trainee(rank, queue, coded(options(1, OuterMode::sync), "sym4:bucket=64"),
                     placed ? Where::device : Where::host, at::kFloat);
        trainee.train(0, 1);
        TensorMap state = trainee.loop->state();
        EXPECT_TRUE(state.at("own.p0.residual").ne(0).any().item<bool>());
        state.at("p0.outer").fill_(outer);
        trainee.loop->load(state);
        trainee.parameters[0].tensor.zero_();
        trainee.loop->step();
        (placed ? got : expected)[rank] = trainee.ended();
      });
    }
    for (int rank = 0; rank < 2; ++rank)
      expectEqual(got[rank], expected[rank], std::to_string(outer) + ", rank " + std::to_string(rank));
  }
}

TEST_F(DiLoCoXOnADevice, NamesWhoseGradientsAreNotFinite) {
  std::vector<std::string> errors(2);
  Ranks ranks(2);
  onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Rank trainee(rank, queue, coded(options(3, OuterMode::sync), "sym4:bucket=64"), Where::device, at::kFloat);
    trainee.train(0, 5);
    const auto before = trainee.outer();
    if (rank == 1) trainee.parameters[0].tensor.fill_(std::numeric_limits<float>::quiet_NaN());
    errors[rank] = test::thrownBy<ValueError>([&] { trainee.loop->step(); });
    const auto after = trainee.outer();
    for (size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(at::equal(before[i].cpu(), after[i].cpu()));
  });
  EXPECT_NE(errors[0].find("on another rank"), std::string::npos) << errors[0];
  EXPECT_NE(errors[1].find("on this rank"), std::string::npos) << errors[1];
}

// Of an outer step one word a tensor crosses besides codes: whether it moved.
TEST_F(DiLoCoXOnADevice, CopiesNoElements) {
  Ranks ranks(2);
  DiLoCoXOptions o = coded(options(1, OuterMode::sync), "sym4:bucket=64");
  o.check_every = 0;
  int64_t before = 0, after = 0;
  const auto copies = [] {
    return std::count_if(fake_device::told.begin(), fake_device::told.end(),
                         [](const std::string& order) { return order.starts_with("copy to host"); });
  };
  onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Rank trainee(rank, queue, o, rank == 0 ? Where::device : Where::host, at::kFloat);
    if (rank == 0) before = copies();
    for (int step = 0; step < 3; ++step)
      trainee.loop->step();
    if (rank == 0) after = copies();
  });
  EXPECT_LE(after - before, 3);
}

// Of an outer step on the host one copy a tensor comes back: the pass that makes the message sends none.
TEST_F(DiLoCoXOnADevice, SendsBackWhatMovedAlone) {
  Ranks ranks(2);
  int64_t before = 0, after = 0;
  const auto copies = [] {
    return std::count_if(fake_device::told.begin(), fake_device::told.end(),
                         [](const std::string& order) { return order.starts_with("copy to device"); });
  };
  onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Trainee trainee(rank, kShapes);
    for (OuterParameter& p : trainee.parameters) {
      if (rank == 0) p.tensor = onDevice(p.tensor);
    }
    DiLoCoX loop(trainee.parameters, queue, coded(options(1, OuterMode::sync), "sym4:bucket=64"));
    if (rank == 0) before = copies();
    for (int step = 0; step < 3; ++step)
      loop.step();
    if (rank == 0) after = copies();
  });
  EXPECT_EQ(after - before, 3 * static_cast<int64_t>(kShapes.size()));
}

// A step in which only a message was sent has moved no parameter: training goes on as if it had not been.
TEST_F(DiLoCoXOnADevice, AFailedOuterStepLeavesWhatRoundingAdded) {
  for (Where where : {Where::host, Where::host_state, Where::device}) {
    std::vector<std::vector<at::Tensor>> without(2), with(2);
    for (bool fails : {false, true}) {
      Ranks ranks(2);
      onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
        Rank trainee(rank, queue, options(3, OuterMode::sync), where, at::kBFloat16);
        trainee.train(0, 3);
        if (fails) {
          at::Tensor& x = trainee.parameters[0].tensor;
          const at::Tensor good = x.clone();
          if (rank == 1) x.fill_(std::numeric_limits<float>::quiet_NaN());
          const std::string error = test::thrownBy<ValueError>([&] {
            for (int step = 0; step < 3; ++step)
              trainee.loop->step();
          });
          EXPECT_TRUE(test::holds(error, {"finite pseudo-gradients"})) << error;
          x.copy_(good);
        }
        trainee.train(3, 9);
        std::vector<at::Tensor>& ended = (fails ? with : without)[rank];
        for (const auto& p : trainee.parameters)
          ended.push_back(p.tensor.cpu().clone());
        for (const at::Tensor& outer : trainee.outer())
          ended.push_back(outer.cpu());
      });
    }
    for (int rank = 0; rank < 2; ++rank)
      expectEqual(with[rank], without[rank], "place " + std::to_string(static_cast<int>(where)));
  }
}

// An op that fails ends when all that it has given the device is over.
TEST_F(DiLoCoXOnADevice, WaitsForTheDeviceAfterAFailure) {
  Ranks ranks(2, [](int, GroupConfig& config) { config.timeout = std::chrono::seconds(2); });
  onRanks(ranks, [&](int rank, const std::shared_ptr<OpQueue>& queue) {
    Rank trainee(rank, queue, coded(options(3, OuterMode::sync), "sym4:bucket=64"),
                 rank == 0 ? Where::device : Where::host, at::kFloat);
    trainee.train(0, 5);
    if (rank == 1) {
      ranks.hub().kill(1);
      return;
    }
    EXPECT_NE(test::thrownBy<PeerError>([&] { trainee.loop->step(); }), "nothing of that type");
  });
  const auto& told = fake_device::told;
  const auto last =
      std::find_if(told.rbegin(), told.rend(), [](const auto& order) { return order.ends_with(" on 0:7"); });
  ASSERT_NE(last, told.rend());
  ASSERT_TRUE(last->starts_with("record ")) << *last;
  const std::string event = last->substr(7, last->find(" on ") - 7);
  EXPECT_NE(std::find(last.base(), told.end(), "synchronize " + event), told.end());
}

TEST_F(DiLoCoXOnADevice, IsRefusedWithoutKernelsOrOnTwoDevices) {
  DiLoCoXOptions o = coded(options(3, OuterMode::sync), "sym4:bucket=64");
  o.on_device = true;
  const auto error = [&](std::vector<OuterParameter> parameters) {
    return test::thrownBy<ValueError>([&] { DiLoCoX(std::move(parameters), nullptr, o); });
  };
  const at::Tensor host = at::ones({2, 3});
  EXPECT_EQ(error({{"a", host}, {"b", onDevice(host)}}),
            "DiLoCoX: outer_place: expected parameters on the CPU or on one CUDA device, got a on cpu, b on cuda:0");
  setCodecKernels(nullptr);
#if !LOWCOMM_CUDA_KERNELS
  EXPECT_EQ(error({{"b", onDevice(host)}}),
            "DiLoCoX: outer_place: expected kernels for the codec on cuda:0, got no CUDA kernels in the build");
#endif
  for (const auto& [change, with] : std::vector<std::pair<std::function<void(DiLoCoXOptions&)>, std::string>>{
           {[](DiLoCoXOptions& x) { x.rank = 2; }, "rank"},
           {[](DiLoCoXOptions& x) { x.eight_bits = true; }, "residual_dtype='int8'"},
           {[](DiLoCoXOptions& x) { x.mode = OuterMode::eager; }, "mode='eager'"}}) {
    o = coded(options(3, OuterMode::sync), "sym4:bucket=64");
    o.on_device = true;
    change(o);
    EXPECT_EQ(error({{"a", host}}), "DiLoCoX: outer_place: expected 'host' with " + with + ", got 'device'");
  }
}

}  // namespace
}  // namespace lowcomm
