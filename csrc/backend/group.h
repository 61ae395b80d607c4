#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "backend/gloo_transport.h"
#include "backend/options.h"
#include "backend/stats.h"
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

  // Whether lowcomm's own transport carries every op of host tensors: no group of gloo is made. Never changes.
  bool carriesAll() const { return settings_.transport == "tcp"; }

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

// How process groups of torch's are made; Python gives both.
struct InnerMakers {
  MakeGloo gloo;
  MakeNccl nccl;
  bool has_nccl = false;  // whether `nccl` makes one here
};

// The backends that serve the ops which lowcomm does not: one for host tensors, gloo, where lowcomm's own transport
// does not carry all of them, and one for CUDA tensors, NCCL, where there is one. Thread-safe, but openHost() and
// close().
class InnerBackends {
 public:
  // `group` outlives this.
  InnerBackends(Group& group, StorePtr store, InnerMakers make);

  // Collective: gloo connects all ranks. Nothing where Group::carriesAll().
  void openHost();

  // Lets go of both.
  void close();

  // NCCL would wait for a rank that has none: no rank of the group uses it where the option leaves it open.
  void leaveOutNccl(int rank_without) { rank_without_nccl_ = rank_without; }
  std::optional<int> rankWithoutNccl() const { return rank_without_nccl_; }

  // The backend of host tensors; null if there is no such backend.
  const BackendPtr& host() const { return host_; }

  // The backend of CUDA tensors, or null without one. Each rank creates it by itself when it meets the first CUDA
  // tensor: its constructor does not communicate, and a process without CUDA tensors must neither wake the CUDA driver
  // nor end with its threads.
  BackendPtr device();

  // device() if it has been created already; otherwise null.
  BackendPtr deviceIfMade() const;

  // The backend of a tensor's device, or null.
  BackendPtr of(const at::Tensor& tensor);

  // That of CUDA tensors where there is one, else the host's.
  BackendPtr deviceOrHost();

  // Calls `f` with each that there is.
  template <class F>
  void eachMade(F&& f) const {
    if (host_) f(*host_);
    if (const BackendPtr device = deviceIfMade()) f(*device);
  }

 private:
  StorePtr keys(const char* prefix) const;  // the store, for one backend

  Group& group_;
  StorePtr store_;
  const InnerMakers make_;
  std::optional<int> rank_without_nccl_;
  BackendPtr host_;
  mutable std::mutex mutex_;
  bool asked_ = false;  // whether `device_` is what there is
  BackendPtr device_;   // null: there is none, or nobody has needed it yet
};

}  // namespace lowcomm
