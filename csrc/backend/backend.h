#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "backend/collectives.h"
#include "backend/group_parts.h"
#include "tensor/compression.h"
#include "wire/layout.h"

namespace lowcomm {

// c10d's ops of a group. Ops of host tensors are lowcomm's own, encoded or exact, tensor by tensor; ranks that decide
// differently meet on one lane and receive an error. CUDA tensors that the policy does not name go to the inner backend
// where the group has one. An op's code is in the file named after the op (overrides.cpp leads there), its objects in
// group_parts.h.
//
// Threads: as any c10d backend, one caller at a time. Collectives run on the engine's worker, in order of issue;
// barrier and shutdown drain it first. Messages are sent and posted by the caller and finished by the thread that
// waits.
class BackendOps : public c10d::Backend {
 public:
  using Options = lowcomm::Options;  // not the base's

  void startCoalescing() override { parts_.blocks.begin(); }
  WorkPtr endCoalescing() override { return parts_.blocks.end(); }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // Beyond c10d; collectives.h says how.
  WorkPtr allReduceCoded(const at::Tensor& tensor, const c10d::ReduceOp& op, const CodecSpec& codec,
                         std::shared_ptr<Residual> residual);
  WorkPtr allReduceLowRank(const Tensors& tensors, const c10d::ReduceOp& op, const CodecSpec& codec,
                           const CodecSpec& projection, const std::vector<std::shared_ptr<Compression>>& states,
                           const std::vector<uint64_t>& slots, const std::vector<uint32_t>& owners, uint32_t step);
  WorkPtr allGatherLayout(const at::Tensor& output, const at::Tensor& input, const Layout& layout, Counter counter);
  WorkPtr reduceScatterLayout(const at::Tensor& output, const at::Tensor& input, const Layout& layout,
                              const c10d::ReduceOp& op, Counter counter);

  GroupParts& parts() { return parts_; }
  const Group& group() const { return parts_.group; }

 protected:
  BackendOps(int rank, int size, c10::intrusive_ptr<Options> options, StorePtr store, MakeNccl make)
      : c10d::Backend(rank, size), parts_(*this, std::move(options), std::move(store), std::move(make)) {}

  GroupParts parts_;
  PointToPoint messages_{parts_};
};

// A c10d backend over inner ones: a group from its making to its end (backend.cpp), with the ops of BackendOps.
class LowcommBackend : public BackendOps {
 public:
  // Collective over the group: ranks compare their options through the store, then connect. DistBackendError when ranks
  // differ or do not show up, ValueError for this rank's options.
  static c10::intrusive_ptr<LowcommBackend> create(StorePtr store, int rank, int size,
                                                   c10::intrusive_ptr<Options> options, MakeNccl make);
  LowcommBackend(StorePtr store, int rank, int size, c10::intrusive_ptr<Options> options, MakeNccl make);
  ~LowcommBackend() override;

  // Releases everything. c10 calls this when the last strong reference goes; the destructor, which does the same, runs
  // only once no weak pointer (the registry's, a parent's) is left. Idempotent.
  void release_resources() override { release(); }

  const std::string getBackendName() const override { return parts_.group.options->name; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return parts_.group.options; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return parts_.group.sequence; }
  void setGroupUid(const std::string& uid) override;
  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  BackendPtr merge(const StorePtr& store, const c10::intrusive_ptr<c10d::Backend::Options>& options, const int& rank,
                   const int& size) override;
  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override { parts_.inner.waitForAll(); }
  void enableCollectivesTiming() override;
  void abort() override;
  void shutdown() override;

  // The group's last ops and messages as JSON (engine/flight.h).
  std::string flightRecord();

  // Whether all ops have ended, and their futures' callbacks let go of what they held, by `end`. Waits up to
  // Engine::kArrivals longer for frames that are still on their way.
  bool settledBy(std::chrono::steady_clock::time_point end);
  // Fails what is under way, at the end of the process. The peers see the connections close.
  void breakOff();

 private:
  c10::intrusive_ptr<Options> childOptions(const c10::intrusive_ptr<c10d::Backend::Options>& given) const;
  std::unique_ptr<Transport> connect(StoreRendezvous& rendezvous);
  void release();
  void leaveRegistry();

  const MakeNccl make_;
  bool left_ = false;  // the registry; under its lock
  std::map<std::string, c10::weak_intrusive_ptr<c10d::Backend>> children_;
};

// All living backends by group name. The Python face looks groups up here, because under TORCH_DISTRIBUTED_DEBUG=DETAIL
// a group holds a wrapper. Returns null for an unknown name.
c10::intrusive_ptr<LowcommBackend> findBackend(const std::string& group_name);
std::vector<std::string> backendNames();

// The counters of all groups of this process by op, those that are gone included; peers are global ranks.
std::map<std::string, OpStats> processStats();
// Sets the counters of the groups that are gone to zero.
void forgetPastStats();

// Before the interpreter goes: gives every living backend's threads `patience` altogether to end what they are at, then
// breaks off what has not ended and waits as long again. A thread that lets go of a tensor or callback of Python's
// while the interpreter is finalised is unwound by it, and aborts the process.
void settleBackends(std::chrono::milliseconds patience);

}  // namespace lowcomm
