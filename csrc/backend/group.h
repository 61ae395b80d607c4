#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/options.h"
#include "backend/stats.h"
#include "backend/store_rendezvous.h"
#include "backend/work.h"
#include "base/process.h"
#include "engine/engine.h"

namespace lowcomm {

// One group as its ops see it: who it is, its settings, its counters, the numbers of its ops, and its engine while it
// lives. Thread-safe, but open() and close().
class Group {
 public:
  // `owner` is the backend that this belongs to, and outlives it.
  Group(c10d::Backend& owner, c10::intrusive_ptr<Options> options);

  const int rank, size;
  const c10::intrusive_ptr<Options> options;
  const std::shared_ptr<CallbackThreads> callbacks{new CallbackThreads, UnlessForked()};
  Stats stats;
  std::atomic<uint64_t> sequence{0};  // the number of the last op
  std::vector<std::string> hosts;     // by rank (engine/handshake.h)

  const std::string& name() const { return options->group_name; }

  std::string uid() const { return owner_.getGroupUid(); }  // c10d's; empty until it has given one

  // This rank in the world, as far as the options know it.
  int globalRank() const;

  // Fills in the settings from the options. Throws ValueError as Options::resolve().
  void resolve();
  Settings settings() const;
  void setPolicy(Policy policy);
  // The policy's codec for an op; nothing where it does not name the op.
  std::optional<CodecSpec> policyCodec(const std::string& op) const;
  uint64_t minBytes() const { return settings_.min_bytes; }  // never changes

  // Counts a call that runs exact although the policy names it, and logs it (INFO) the first time for this reason.
  void noteExact(const std::string& op, const std::string& because);

  // ---- life ----
  void open(std::shared_ptr<Engine> engine) { engine_ = std::move(engine); }

  // Releases the engine. Call it when no op can be in progress any more.
  void close() { engine_.reset(); }

  // The engine; throws DistBackendError where the group was shut down.
  Engine& engine();

  // Whether this is the process that made the group, and no child that it forked.
  bool isHere() const { return process_.isHere(); }

  // The engine if there is one and this is its process, also of a group that is over. `stop`: no op is issued from now
  // on.
  Engine* running(bool stop = false);

  // The engine, for an object that outlives the group.
  const std::shared_ptr<Engine>& sharedEngine() const { return engine_; }

  // Shuts the engine down. Any number of times.
  void stop();

  bool lives();

  // An op of a group that is over, or in a child that the group's process has forked, fails at once, with the first
  // cause, also where the inner backend would have served it: DistBackendError.
  void expectLiving(const std::string& op);

  // For an op that is put off and may outlive the group: keeps the backend while the result of the call lives. The call
  // throws DistBackendError where the backend is gone.
  std::function<BackendPtr()> living(const char* op) const;

 private:
  void expectHere(const std::string& op) const;

  c10d::Backend& owner_;
  const Process process_;
  mutable std::mutex settings_mutex_;
  Settings settings_;
  std::mutex engine_mutex_;
  std::shared_ptr<Engine> engine_;  // shared with point-to-point Works, which outlive the group as its empty shell
  std::atomic<bool> stopped_{false};
};

// Makes a ProcessGroupNCCL, or null where this torch or machine has none. `options` are the group's: time-out, name,
// global ranks.
using MakeNccl =
    std::function<BackendPtr(const StorePtr&, int rank, int size, const c10::intrusive_ptr<Options>& options)>;

// The inner backend, which serves exact ops of CUDA tensors in a group with `nccl`: a ProcessGroupNCCL. Each rank makes
// it when it meets its first CUDA tensor: the constructor does not communicate, and a process without CUDA tensors must
// neither wake the CUDA driver nor end with its threads. Thread-safe, except close().
class InnerBackend {
 public:
  // `group` outlives this.
  InnerBackend(Group& group, StorePtr store, MakeNccl make);

  // Releases it. Call it when no op can be in progress any more.
  void close();

  // Returns the backend; null without `nccl`, or where torch or the machine has none.
  BackendPtr get();

  // get() if it has been made already; otherwise null.
  BackendPtr ifMade() const;

  // The backend that serves exact ops of a tensor, or null: lowcomm carries them.
  BackendPtr of(const at::Tensor& tensor);

 private:
  Group& group_;
  StorePtr store_;
  const MakeNccl make_;
  mutable std::mutex mutex_;
  bool asked_ = false;  // whether `backend_` is what there is
  BackendPtr backend_;  // null: there is none, or no op has needed it yet
};

}  // namespace lowcomm
