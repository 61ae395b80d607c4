#include "backend/work.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <set>

#include "backend/inner_work.h"
#include "fake_device.h"

namespace lowcomm {
namespace {

using namespace fake_device;
using Told = std::vector<std::string>;
using namespace std::chrono_literals;

c10::intrusive_ptr<EngineWork> makeWork(Tensors outputs, std::shared_ptr<CallbackThreads> threads,
                                        DeviceQueue* queue = nullptr) {
  return c10::make_intrusive<EngineWork>(0, c10d::OpType::ALLGATHER, "lowcomm:test",
                                         EngineWork::Name{"all_gather", "a group", 3}, Tensors{}, std::move(outputs),
                                         std::move(threads), queue);
}

// A Work of an inner backend that says of a device's op what NCCL's does.
struct DeviceWork final : c10d::Work {
  DeviceWork() : c10d::Work(0, c10d::OpType::ALLREDUCE) {}
  bool isCompleted() override { return done; }
  bool isSuccess() const override { C10_THROW_ERROR(NotImplementedError, "WorkNCCL::isSuccess() is deprecated"); }
  std::exception_ptr exception() const override { return error; }
  void synchronize() override { tell("synchronize the work"); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  void end(std::exception_ptr how = nullptr) {
    done = true;
    error = how;
  }

  bool done = false;
  std::exception_ptr error;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

c10::intrusive_ptr<InnerWork> inner(const c10::intrusive_ptr<DeviceWork>& work, Tensors outputs) {
  return c10::make_intrusive<InnerWork>(
      work, c10d::OpType::ALLREDUCE, 0, 1,
      InnerOpAccount{"lowcomm: all_reduce failed [", std::chrono::steady_clock::now()}, std::move(outputs));
}

TEST(EngineWork, CompletesWhoeverAsks) {
  auto threads = std::make_shared<CallbackThreads>();
  auto work = makeWork({at::ones({2})}, threads);
  EXPECT_FALSE(work->isCompleted());
  work->complete(nullptr);
  EXPECT_TRUE(work->isCompleted());
  EXPECT_TRUE(work->wait(kNoTimeout));
  EXPECT_TRUE(work->getFuture()->completed());
  EXPECT_EQ(work->getFuture()->value().toTensorVector().size(), 1u);
}

TEST(EngineWork, AWaitOfItsOwnTimeoutNamesTheOp) {
  auto threads = std::make_shared<CallbackThreads>();
  auto work = makeWork({}, threads);
  try {
    work->wait(1ms);
    FAIL();
  } catch (const c10::DistBackendError& error) {
    const std::string what = error.what_without_backtrace();
    EXPECT_NE(what.find("waiting for all_gather on rank 0"), std::string::npos) << what;
    EXPECT_NE(what.find("sequence 3, group a group"), std::string::npos) << what;
  }
  work->complete(nullptr);
  EXPECT_TRUE(work->wait(kNoTimeout));
}

// The thread that completes a Work goes on at once, whatever the callbacks do.
TEST(EngineWork, CallbacksRunElsewhere) {
  auto threads = std::make_shared<CallbackThreads>();
  auto first = makeWork({}, threads), second = makeWork({}, threads);
  std::promise<void> done;
  first->getFuture()->addCallback([&](c10::ivalue::Future&) {
    second->wait(kNoTimeout);  // completed by the same thread, afterwards
    done.set_value();
  });
  first->complete(nullptr);
  second->complete(nullptr);
  EXPECT_EQ(done.get_future().wait_for(60s), std::future_status::ready);
}

TEST(EngineWork, ErrorsReachWaitAndFuture) {
  auto threads = std::make_shared<CallbackThreads>();
  auto work = makeWork({}, threads);
  auto future = work->getFuture();
  work->complete(std::make_exception_ptr(std::runtime_error("lost")));
  EXPECT_THROW(work->wait(kNoTimeout), std::runtime_error);
  EXPECT_THROW(future->waitAndThrow(), std::runtime_error);
}

// The future of device outputs is ordered by an event on the side stream, where the copies are: a callback's stream or
// a waiter's waits for it.
TEST(EngineWork, TheFutureOfDeviceOutputsCarriesTheSideStream) {
  for (bool asked : {false, true}) {
    reset();
    auto threads = std::make_shared<CallbackThreads>();
    DeviceQueue queue({kType, 0});
    auto work = makeWork({onDevice({1})}, threads, &queue);
    auto future = asked ? work->getFuture() : nullptr;
    work->complete(nullptr);
    threads->stop();
    EXPECT_EQ(told, (Told{"record e1 on 0:7"})) << asked;
    work->getFuture()->wait();
    EXPECT_EQ(std::count(told.begin(), told.end(), "block 0:5 on e1"), 1) << asked;
    work->wait(kNoTimeout);
  }
}

// c10's own future of several has no devices: it waits for none of their streams, and nobody waits for it.
TEST(GroupWork, ItsFutureWaitsForEveryDeviceOp) {
  reset();
  auto threads = std::make_shared<CallbackThreads>();
  DeviceQueue queue({kType, 0});
  auto group = c10::make_intrusive<GroupWork>(0, c10d::OpType::COALESCED);
  std::vector<c10::intrusive_ptr<EngineWork>> works;
  for (float value : {1.0f, 2.0f}) {
    works.push_back(makeWork({onDevice({value})}, threads, &queue));
    group->add(works.back());
  }
  group->issue();
  auto future = group->getFuture();
  for (auto& work : works)
    work->complete(nullptr);
  threads->stop();
  const auto all = [&](const std::string& order) { return std::count(told.begin(), told.end(), order); };
  // The callback's stream waits for both, and is what the future stands for.
  EXPECT_TRUE(told.back().starts_with("record e3")) << told.back();
  for (const std::string event : {"e1", "e2"})
    EXPECT_GE(all("block " + told.back().substr(told.back().find("on ") + 3) + " on " + event), 1) << event;
  future->wait();
  EXPECT_EQ(all("block 0:5 on e3"), 1);
  EXPECT_EQ(future->value().toTensorVector().size(), 2u);
}

TEST(GroupWork, ItsFutureHasAPartsError) {
  auto threads = std::make_shared<CallbackThreads>();
  auto group = c10::make_intrusive<GroupWork>(0, c10d::OpType::COALESCED);
  auto first = makeWork({at::ones({1})}, threads), second = makeWork({}, threads);
  group->add(first);
  group->add(second);
  group->issue();
  auto future = group->getFuture();
  first->complete(nullptr);
  second->complete(std::make_exception_ptr(std::runtime_error("lost")));
  EXPECT_THROW(future->waitAndThrow(), std::runtime_error);
}

TEST(InnerWork, AsksNoInnerWorkWhetherItSucceeded) {
  for (bool fails : {false, true}) {
    auto nccl = c10::make_intrusive<DeviceWork>();
    auto work = inner(nccl, {});
    EXPECT_FALSE(work->isCompleted());
    EXPECT_FALSE(work->isSuccess());
    nccl->end(fails ? std::make_exception_ptr(std::runtime_error("lost")) : nullptr);
    EXPECT_TRUE(work->isCompleted());
    EXPECT_EQ(work->isSuccess(), !fails);
  }
}

TEST(CallbackThreads, NoTaskWaitsForAnother) {
  CallbackThreads threads;
  constexpr int kDeep = 8;
  std::atomic<int> running{0};
  std::promise<void> all;
  auto released = all.get_future().share();
  for (int i = 0; i < kDeep; ++i) {
    threads.run([&, released] {
      if (++running == kDeep) all.set_value();
      released.wait();
    });
  }
  EXPECT_EQ(released.wait_for(60s), std::future_status::ready);
}

TEST(CallbackThreads, StopRunsTheRest) {
  CallbackThreads threads;
  std::atomic<int> ended{0};
  for (int i = 0; i < 2; ++i)
    threads.run([&] { ++ended; });
  threads.stop();
  EXPECT_EQ(ended, 2);
  threads.run([&] { ++ended; });  // on this thread
  EXPECT_EQ(ended, 3);
  threads.stop();
}

TEST(CallbackThreads, ATaskMayStopThem) {
  auto threads = std::make_unique<CallbackThreads>();
  std::promise<void> done;
  threads->run([&] {
    threads->stop();
    done.set_value();
  });
  EXPECT_EQ(done.get_future().wait_for(60s), std::future_status::ready);
}

}  // namespace
}  // namespace lowcomm
