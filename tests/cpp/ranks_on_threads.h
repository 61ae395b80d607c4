#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <typeindex>
#include <vector>

#include "collective/exchange.h"
#include "collective/plan.h"
#include "engine/engine.h"
#include "errors.h"
#include "memory_transport.h"

namespace lowcomm::test {

// The outcome of an op on one rank. It is taken down on the thread that failed: libstdc++ counts the references to an
// exception where the thread sanitizer does not see it.
class Outcome {
 public:
  Outcome(const std::exception_ptr& error, const OpCounters& counters)
      : counters(counters), ended_on(std::this_thread::get_id()) {
    if (!error) return;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      text_ = e.what();
      note<ValueError, NonFiniteError, TypeError, PeerError, PeerRefusal>(e);
    }
  }

  OpCounters counters;
  std::thread::id ended_on;  // the thread that Done came from

  bool ok() const { return types_.empty(); }

  // Whether it failed with E, or a type made of it.
  template <class E>
  bool is() const {
    return types_.contains(typeid(E));
  }

  const std::string& what() const { return text_; }

  // what() without the op's numbers at its end, of which bytes and seconds differ between runs.
  std::string story() const { return text_.substr(0, text_.find(" [op")); }

 private:
  template <class... E>
  void note(const std::exception& e) {
    types_.insert(typeid(std::exception));
    ((dynamic_cast<const E*>(&e) ? void(types_.insert(typeid(E))) : void()), ...);
  }

  std::string text_ = "no error";
  std::set<std::type_index> types_;
};

// The ranks of one group, each an Engine on the hub: their workers are the threads. Everything that waits has a
// deadline; ops that outlive it are a failure of the test, are aborted, and end the process if even that does not help.
class Ranks {
 public:
  using Job = std::function<void(int rank, OpContext& op)>;
  using Configure = std::function<void(int rank, GroupConfig& config)>;

  static constexpr std::chrono::seconds kDeadline{30};

  using MakeTransport = std::function<std::unique_ptr<Transport>(int rank)>;

  // `make`: their transports, where it is not the hub's.
  explicit Ranks(int size, const Configure& configure = nullptr, const MakeTransport& make = nullptr) : hub_(size) {
    for (int rank = 0; rank < size; ++rank) {
      GroupConfig config;
      config.chunk_bytes = kMinChunkBytes;
      config.timeout = std::chrono::seconds(20);
      if (configure) configure(rank, config);
      engines_.push_back(std::make_unique<Engine>(make ? make(rank) : hub_.transport(rank), config));
    }
  }

  int size() const { return static_cast<int>(engines_.size()); }
  MemoryHub& hub() { return hub_; }
  Engine& engine(int rank) { return *engines_[rank]; }

  // Submits on one rank.
  std::future<Outcome> start(int rank, const std::string& op, const Job& job) {
    auto ended = std::make_shared<std::promise<Outcome>>();
    auto future = ended->get_future();
    engine(rank).submit(
        op, [rank, job](OpContext& context) { job(rank, context); },
        [ended](std::exception_ptr error, const OpCounters& counters) { ended->set_value(Outcome(error, counters)); });
    return future;
  }

  // Waits for every future: one a rank, in order.
  std::vector<Outcome> finish(std::vector<std::future<Outcome>>&& pending) {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    for (size_t i = 0; i < pending.size(); ++i) {
      if (pending[i].wait_until(deadline) == std::future_status::ready) continue;
      ADD_FAILURE() << "op " << i << " has not ended after " << kDeadline.count() << " s";
      for (auto& engine : engines_)
        engine->abort("the test's deadline");
      if (pending[i].wait_for(kDeadline) == std::future_status::ready) continue;
      std::fprintf(stderr, "op %zu hangs and cannot be aborted\n", i);
      std::abort();
    }
    std::vector<Outcome> outcomes;
    for (auto& future : pending)
      outcomes.push_back(future.get());
    return outcomes;
  }

  // Submits on every rank and waits for all.
  std::vector<Outcome> run(const std::string& op, const Job& job) {
    std::vector<std::future<Outcome>> pending;
    for (int rank = 0; rank < size(); ++rank)
      pending.push_back(start(rank, op, job));
    return finish(std::move(pending));
  }

  // As run(), of an op that must succeed everywhere.
  std::vector<OpCounters> expectRun(const std::string& op, const Job& job) {
    std::vector<OpCounters> counters;
    for (const Outcome& outcome : run(op, job)) {
      EXPECT_TRUE(outcome.ok()) << "rank " << counters.size() << " of " << size() << ": " << outcome.what();
      counters.push_back(outcome.counters);
    }
    return counters;
  }

 private:
  MemoryHub hub_;  // outlives the engines, which are shut down one after the other
  std::vector<std::unique_ptr<Engine>> engines_;
};

// The rank that cannot send fails with NonFiniteError, the others with the PeerRefusal that they are told; all name it.
inline void expectRefusedBy(int bad, const std::vector<Outcome>& outcomes, const std::vector<std::string>& parts) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    const bool own = static_cast<int>(rank) == bad;
    EXPECT_EQ(outcomes[rank].is<NonFiniteError>(), own) << outcomes[rank].what();
    EXPECT_EQ(outcomes[rank].is<PeerRefusal>(), !own) << outcomes[rank].what();
    EXPECT_TRUE(holds(outcomes[rank].what(), parts));
  }
}

}  // namespace lowcomm::test
