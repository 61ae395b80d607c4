#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "diloco/diloco.h"
#include "ranks_on_threads.h"
#include "tensors.h"

namespace lowcomm::test {

inline DiLoCoXOptions options(int64_t sync_every, OuterMode mode) {
  DiLoCoXOptions o;
  o.sync_every = sync_every;
  o.mode = mode;
  return o;
}

inline DiLoCoXOptions coded(DiLoCoXOptions o, const std::string& codec, int64_t rank = 0, bool feedback = true) {
  o.codec = CodecSpec::parse(codec);
  o.rank = rank;
  o.error_feedback = feedback;
  return o;
}

// One rank's model and its inner training: gradient descent towards a target of its own, by which step s's gradient is
// the same in every run.
struct Trainee {
  std::vector<OuterParameter> parameters;
  int rank;
  std::unique_ptr<DiLoCoX> loop;

  Trainee(int rank, const std::vector<std::vector<int64_t>>& shapes) : rank(rank) {
    for (size_t i = 0; i < shapes.size(); ++i)
      parameters.push_back({"p" + std::to_string(i), noise(shapes[i], 1000 + i)});
  }

  static at::Tensor noise(at::IntArrayRef shape, uint64_t seed) {
    return at::randn(shape, at::detail::createCPUGenerator(seed), at::kFloat);
  }

  at::Tensor gradient(size_t i, int64_t step) const {
    const at::Tensor& x = parameters[i].tensor;
    return (x - noise(x.sizes(), 7 * i + rank)) * 0.1 + noise(x.sizes(), 100000 + 1000 * step + 10 * i + rank) * 0.05;
  }

  void inner(int64_t step, double lr = 0.1) {
    for (size_t i = 0; i < parameters.size(); ++i)
      parameters[i].tensor.sub_(gradient(i, step) * lr);
  }

  void train(int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      inner(step);
      loop->step();
    }
  }

  // To an inner step that is the same on all ranks: one that has joined the others may have left some out.
  void trainUntil(int64_t steps) {
    while (loop->steps() < steps)
      train(loop->steps(), loop->steps() + 1);
  }

  std::vector<at::Tensor> outer() const {
    std::vector<at::Tensor> all;
    loop->each([&](const OuterParameter&, const at::Tensor& outer) { all.push_back(outer.clone()); });
    return all;
  }
};

// f(rank, queue) on a thread a rank; what it throws is rethrown here, of the lowest rank.
template <class F>
void onRanks(Ranks& ranks, F&& f) {
  std::vector<std::future<void>> all;
  std::vector<std::shared_ptr<EngineQueue>> queues;
  for (int rank = 0; rank < ranks.size(); ++rank)
    queues.push_back(std::make_shared<EngineQueue>(ranks.engine(rank)));
  for (int rank = 0; rank < ranks.size(); ++rank)
    all.push_back(std::async(std::launch::async, [&, rank] { f(rank, queues[rank]); }));
  for (auto& one : all)
    one.wait();
  for (auto& one : all)
    one.get();
}

// Holds ops, as a slow link does: calls `hold` with the name of each before it runs.
class HeldQueue : public EngineQueue {
 public:
  HeldQueue(Engine& engine, std::function<void(const std::string&)> hold)
      : EngineQueue(engine), hold_(std::move(hold)) {}

  void submit(const std::string& op, uint32_t sequences, Engine::Job job, Engine::Done done) override {
    auto held = [hold = hold_, op, job = std::move(job)](OpContext& context) {
      hold(op);
      job(context);
    };
    EngineQueue::submit(op, sequences, std::move(held), std::move(done));
  }

 private:
  std::function<void(const std::string&)> hold_;
};

inline const std::vector<std::vector<int64_t>> kShapes = {{48, 64}, {100}, {30, 5, 4}, {64, 32}};

}  // namespace lowcomm::test
