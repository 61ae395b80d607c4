#pragma once

#include <map>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend/callback_threads.h"
#include "backend/options.h"
#include "backend/stats.h"
#include "backend/group_work.h"
#include "backend/inner_work.h"
#include "collective/all_gather.h"
#include "collective/device_codec.h"
#include "collective/reduce_scatter.h"
#include "engine/engine.h"
#include "tensor/compression.h"
#include "tensor/device_queue.h"
#include "tensor/residual.h"
#include "wire/key_values.h"

namespace lowcomm {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

struct OpBuffers;

// What an inner backend is made for.
enum class Role { host, device, lane };

// Makes an inner backend: Role::host a full ProcessGroupGloo, Role::device a ProcessGroupNCCL or null where there is
// none, Role::lane a ProcessGroupGloo with `connections` of its own to every peer for lowcomm's frames. `options` are
// the group's: time-out, name, global ranks.
using MakeInner = std::function<BackendPtr(Role, const StorePtr&, int rank, int size,
                                           const c10::intrusive_ptr<Options>& options, int connections)>;

// The numbers a stochastic codec draws by, for callers that keep count of tensors and steps themselves.
struct Counter {
  uint64_t slot =
      0;  // the tensor's number within the step; a layout uses one a segment, a reduce_scatter one a slice too
  uint32_t step = 0;
};

// A c10d backend over inner ones. all_gather and reduce_scatter on host tensors are its own exchange; all_reduce,
// all_to_all, broadcast, gather and messages are where the policy names them. Own ops are encoded or exact, tensor by
// tensor, and ranks that decide differently meet on one lane and hear of it. All else goes to the inner backend of the
// tensor's device unchanged. See docs of each file: exact.cpp, gather.cpp,
// scatter.cpp, all_reduce.cpp, all_to_all.cpp, rooted.cpp, point_to_point.cpp, coalescing.cpp, backend.cpp (life).
//
// Threads: as any c10d backend, one caller at a time. Own collectives run on the engine's worker, in order of issue;
// barrier and shutdown drain it first. Own messages are sent and posted by the caller and finished by whoever waits.
class LowcommBackend : public c10d::Backend {
 public:
  using Options = lowcomm::Options;  // not the base's

  // Collective over the group: hands are shaken through the store. DistBackendError when ranks differ or do not show
  // up, ValueError for this rank's options.
  static c10::intrusive_ptr<LowcommBackend> create(StorePtr store, int rank, int size,
                                                   c10::intrusive_ptr<Options> options, MakeInner make);
  LowcommBackend(StorePtr store, int rank, int size, c10::intrusive_ptr<Options> options, MakeInner make);
  ~LowcommBackend() override;

  // What the destructor is to other classes. c10 calls it when the last owner goes and runs the destructor only once no
  // weak pointer (the registry's, a parent's) is left either. Both lead here; the second time does nothing.
  void release_resources() override { release(); }

  // ---- identity and life (backend.cpp) ----
  const std::string getBackendName() const override { return options_->name; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  bool supportsTimeEstimation() const override { return false; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
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
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override;
  void abort() override;
  void shutdown() override;

  // Whether all ops have ended, and their futures' callbacks let go of what they held, by `end`.
  bool settledBy(std::chrono::steady_clock::time_point end);

  // ---- served by the inner backend (exact.cpp) ----
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // ---- point to point: own where the policy names p2p, else the inner backend's (point_to_point.cpp) ----
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  // ValueError where the policy names p2p: the sender must be named.
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // ---- coalescing (coalescing.cpp) ----
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // ---- own all_gather in every form (gather.cpp) ----
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;

  // ---- own reduce_scatter in every form (scatter.cpp) ----
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;

  // ---- own where the policy names them, else the inner backend's (all_reduce.cpp, all_to_all.cpp, rooted.cpp) ----
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;

  // ---- beyond c10d ----
  // all_reduce of one dense tensor by a codec named by the caller, whatever the policy, min_bytes and lc.exact() say;
  // with error feedback where `residual` is not null. SUM, AVG, or (without a residual) PREMUL_SUM. ValueError or
  // TypeError before anything is sent: another op, dtype or codec, a residual of another size or in use.
  WorkPtr allReduceCoded(const at::Tensor& tensor, const c10d::ReduceOp& op, const CodecSpec& codec,
                         std::shared_ptr<Residual> residual);

  // all_reduce of tensors in one message or, where a state has a rank, in two (collective/low_rank_all_reduce.h),
  // whatever policy and lc.exact() say. Of each tensor: its slot in the draws, of which it takes 2 a rank of the group,
  // and the rank, modulo their number, that sums its first slice; by these its bits are the same whatever it travels
  // with. `projection` is P's codec. When the Work ends each state's done() tells whether the result is finite, and the
  // caller commits or rolls back. ValueError or TypeError before anything is sent: tensors, op, codecs (they have
  // nonfinite=poison) or states that will not do.
  WorkPtr allReduceLowRank(const Tensors& tensors, const c10d::ReduceOp& op, const CodecSpec& codec,
                           const CodecSpec& projection, const std::vector<std::shared_ptr<Compression>>& states,
                           const std::vector<uint64_t>& slots, const std::vector<uint32_t>& owners, uint32_t step);

  // Changes the policy of a living group. Collective; throws ValueError (this rank's text is wrong) or DistBackendError
  // (ranks differ), and then nothing has changed. Ops issued before keep the old policy.
  void setPolicy(const std::string& text);

  // Agrees on named layouts with the group. Collective; DistBackendError names the first one that differs and where.
  // `error`, unless it is empty, is what keeps this rank from taking part: the peers get it as theirs, this one
  // returns.
  void agreeLayouts(const std::vector<std::pair<std::string, Layout>>& layouts, const std::string& error);

  // The same of any named texts, options of a hook say; `what` begins the messages.
  void agreeOnTexts(const std::string& what, std::vector<std::pair<std::string, std::string>> fields,
                    const std::string& error);

  // Queues an op of somebody who keeps state between ops (engine/op_queue.h); it takes `sequences` sequence numbers and
  // is counted under `op`. `done` gets the core's own exceptions.
  void queueOwn(const std::string& op, uint32_t sequences, Engine::Job job, Engine::Done done);

  // Reserves `count` consecutive slots for layouts' draws and returns the first. Ops under a policy draw from the slots
  // below kLayoutSlots, which no op has tensors and ranks enough to reach, layouts from those above.
  uint64_t reserveSlots(uint64_t count);
  static constexpr uint64_t kLayoutSlots = 1ull << 32;

  // Point-to-point messages draw in the steps from here on, one each; no op's sequence number comes so far.
  static constexpr uint32_t kP2pSteps = 1u << 31;

  // Counts a call that goes exact though somebody named it, and logs it (INFO) the first time for this reason.
  void noteExact(const std::string& op, const std::string& because);

  // The key of this group's random draws: the seed mixed with the group's name, so that no two groups of a rank share
  // them.
  uint64_t drawKey() const;

  // all_gather of a flat buffer whose layout was agreed: [n] into [size·n], one message, each segment by its own codec.
  WorkPtr allGatherLayout(const at::Tensor& output, const at::Tensor& input, const Layout& layout, Counter counter);

  // reduce_scatter of a flat buffer [size·n] into [n] whose slices have the agreed layout.
  WorkPtr reduceScatterLayout(const at::Tensor& output, const at::Tensor& input, const Layout& layout,
                              const c10d::ReduceOp& op, Counter counter);

  // Connects the group's lanes if they are not; DistBackendError where it was released.
  Engine& engine();

  // The group's last ops and messages as JSON (engine/flight.h).
  std::string flightRecord();

  Settings settings() const;
  const Stats& stats() const { return stats_; }
  Stats& stats() { return stats_; }
  BackendPtr inner() const { return host_; }
  const std::string& groupName() const { return options_->group_name; }

 protected:
  // Issues an op. Inside a coalescing block nothing is raised: the block's end throws the first error, and so does the
  // Work that stands for the op.
  WorkPtr inBlock(c10d::OpType op, const std::function<WorkPtr()>& issue);

 private:
  struct Pending {
    c10::intrusive_ptr<GroupWork> work;
    bool receive = false;
    bool device = false;
    std::function<void()> prepare;  // before anything of the block is issued; may be empty
  };
  struct Block;
  struct P2pRequest;
  struct P2pInFlight;

  BackendPtr innerFor(const at::Tensor& tensor);
  BackendPtr forDevices();
  BackendPtr madeForDevices() const;
  // An op for the inner backend of its first tensor.
  struct InnerCall {
    c10d::OpType type;
    const char* name;
    Tensors tensors, outputs;
    std::optional<KeyValues> description = {};  // what all ranks compare before the inner backend is called
    std::function<void()> finish = {};          // once it has succeeded; may be empty
    bool collective = true;
    std::string detail = {};  // for errors
    // Of viaInner():
    BackendPtr inner = {};
    uint64_t bytes = 0, sequence = 0;
  };
  // Hands the op to the inner backend: now, or at the end of an open block. `call` keeps what it needs.
  WorkPtr viaInner(InnerCall op, std::function<WorkPtr(c10d::Backend&)> call);
  WorkPtr callInner(const InnerCall& op, const std::function<WorkPtr(c10d::Backend&)>& call);
  WorkPtr queueInner(const InnerCall& op, const std::function<WorkPtr(c10d::Backend&)>& call);
  void runInner(const InnerCall& op, const std::function<WorkPtr(c10d::Backend&)>& call, OpContext& context);
  WorkPtr pointToPoint(c10d::OpType op, const Tensors& tensors, int peer, int tag,
                       std::function<WorkPtr(c10d::Backend&)> call);
  // Of coalescing blocks: coalescing.cpp. Puts off a message, inside a block.
  WorkPtr postpone(c10d::OpType op, Pending pending, std::function<WorkPtr()> issue);
  // Puts off a collective of an open block that was checked and has its number: `start` runs at the block's end, or
  // when somebody waits for the op or for one after it; else `cancel` gets the error that ended the block.
  WorkPtr putOff(c10d::OpType op, uint64_t sequence, std::function<WorkPtr()> start,
                 std::function<void(std::exception_ptr)> cancel = {});
  // Starts what collectives were put off so far.
  void startPutOff();
  void startBlock(Block& block);
  void cancelBlock(Block& block, const std::exception_ptr& error);
  void leaveBlock(const std::string& why);
  bool keepsError(const std::weak_ptr<Block>& block, const std::exception_ptr& error);
  c10::intrusive_ptr<GroupWork> standIn(c10d::OpType op, std::function<WorkPtr()> start);
  // The first of `count` numbers of ops that run at once, also inside a block: after what was put off in it.
  uint64_t takeNumbers(uint64_t count);
  // The group, for what may outlive it: throws DistBackendError where it is gone.
  std::function<c10::intrusive_ptr<LowcommBackend>()> living(const char* op);
  WorkPtr exactOrCoded(c10d::OpType op, const Tensors& tensors, int peer, int tag,
                       std::function<WorkPtr(c10d::Backend&)> call);
  void checkPeer(const char* name, int peer) const;
  void checkExact(c10d::OpType op, const Tensors& tensors, int peer, int tag) const;
  std::shared_ptr<P2pRequest> coded(c10d::OpType type, const Tensors& tensors, int peer, int tag);
  void prepare(P2pRequest& message);
  WorkPtr post(const std::shared_ptr<P2pRequest>& coded);
  void finish(P2pInFlight& flight);
  // A reduction as the inner backend of the tensors has it, after multiply().
  struct HostReduction {
    c10d::ReduceOp op;
    std::optional<double> factor;
    void multiply(Tensors& tensors) const;
  };
  HostReduction hostReduction(const Tensors& tensors, const c10d::ReduceOp& op);
  bool ownOp(const at::Tensor& tensor, const std::string& op);
  bool ownScatter(const at::Tensor& output, const c10d::ReduceOp& op);
  int globalRank() const;
  bool named(const std::string& op) const;
  static std::string exactBecauseOf(at::ScalarType type);
  std::optional<CodecSpec> chooseCodec(const std::string& op, const at::Tensor& tensor, uint64_t raw_bytes,
                                       const std::string& counted_as = "");
  WorkPtr gatherMany(c10d::OpType op, std::vector<Tensors> outputs, Tensors inputs, const Layout* layout,
                     Counter counter);
  WorkPtr scatterMany(c10d::OpType op, Tensors outputs, std::vector<Tensors> inputs, const c10d::ReduceOp& reduce,
                      const Layout* layout, Counter counter);
  WorkPtr reduceMany(c10d::OpType op, Tensors tensors, const std::vector<CodecSpec>& codecs, const Reduction& reduction,
                     std::shared_ptr<Residual> residual);
  WorkPtr reduceByPolicy(c10d::OpType op, const Tensors& tensors, const c10d::ReduceOp& reduce);
  std::vector<CodecSpec> codecsOfParts(const std::string& op, const Tensors& parts, uint64_t contribution);
  std::vector<CodecSpec> codecsOf(const std::string& op, const Tensors& tensors);
  WorkPtr exchangeParts(c10d::OpType op, Tensors outputs, Tensors inputs, Tensors kept_outputs, Tensors kept_inputs);
  bool ownAllToAll(const Tensors& inputs, const Tensors& outputs);
  // What ranks compare of an op that the policy names and the inner backend is to serve, with `more` fields before the
  // codec (inner_description.cpp); nothing where the policy does not name it.
  std::optional<KeyValues> describeForInner(const std::string& op, const Tensors& tensors,
                                            const std::vector<std::pair<std::string, std::string>>& more) const;
  WorkPtr exactBroadcast(Tensors& tensors, const c10d::BroadcastOptions& opts);
  WorkPtr exactAllReduce(Tensors& tensors, const c10d::AllreduceOptions& opts);
  WorkPtr exactAllReduceCoalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts);
  WorkPtr exactGather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts);
  WorkPtr exactAllToAllBase(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                            std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts);
  WorkPtr exactAllToAll(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts);
  // What of an op asks whether its elements can stay on their device (staging.cpp).
  struct StagingRequest {
    Tensors tensors;                // inputs and outputs
    std::vector<CodecSpec> codecs;  // of all of them
    bool keeps_own = false;         // whether something is not encoded that obeys the codec's nonfinite= all the same
    std::string because = {};       // what else speaks against it

    void add(const Layout& layout);  // its segments' codecs
  };
  // The device codec of an op, or null: its tensors are on the host (`queue` is null), or their values are copied
  // there, which is counted and, the first time for its reason, logged (INFO).
  std::shared_ptr<DeviceCodec> deviceCodecFor(const std::string& op, DeviceQueue* queue, const StagingRequest& staged);
  struct OwnCall {
    c10d::OpType type;
    const char* name;
    uint64_t sequence;
    bool exact;
  };
  WorkPtr submit(const OwnCall& op, Tensors inputs, Tensors outputs, DeviceQueue* queue,
                 std::shared_ptr<OpBuffers> buffers);
  // Queues a job under a number of the group's and blocks until it has ended; throws its error.
  void runAndWait(const std::string& op, uint64_t sequence, Engine::Job job);
  void agreeOn(const std::string& op, const KeyValues& hello, std::exception_ptr mine);
  void connect();
  DeviceQueue& queueOf(c10::Device device);
  // Null: on the host. ValueError where a CUDA graph is captured.
  DeviceQueue* queueOf(const std::string& op, const at::Tensor& tensor);
  void expectNoCapture(const std::string& op, const at::Tensor& tensor) const;
  // `progress`: its entry in the flight record, where it has one.
  InnerOpAccount accountOf(const std::string& name, uint64_t sequence, const std::string& detail,
                    std::shared_ptr<OpProgress> progress = nullptr) const;
  void expectLiving(const std::string& op);
  c10::intrusive_ptr<Options> childOptions(const c10::intrusive_ptr<c10d::Backend::Options>& given) const;
  Engine* running(bool stop = false);
  void stop();

  void release();
  void leaveRegistry();

  StorePtr store_;
  c10::intrusive_ptr<Options> options_;
  MakeInner make_;
  BackendPtr host_;
  mutable std::mutex device_mutex_;
  bool device_asked_ = false;  // whether `device_` is what there is
  BackendPtr device_;          // null: there is none, or nobody has needed it yet
  uint32_t epoch_ = 0;
  mutable std::mutex settings_mutex_;
  Settings settings_;
  Stats stats_;
  std::mutex engine_mutex_;
  std::shared_ptr<Engine> engine_;  // shared with point-to-point Works, which outlive the group as its empty shell
  std::atomic<bool> stopped_{false};
  std::atomic<uint64_t> sequence_{0};
  std::shared_ptr<Block> block_;      // not null inside a coalescing block
  std::atomic<int> queued_inner_{0};  // ops of the inner backend that wait for their turn on the worker
  std::map<c10::DeviceIndex, DeviceQueue> queues_;
  std::shared_ptr<CallbackThreads> callbacks_ = std::make_shared<CallbackThreads>();
  std::atomic<uint64_t> slots_{0};
  std::atomic<uint32_t> sent_{0};
  std::map<std::string, c10::weak_intrusive_ptr<c10d::Backend>> children_;
};

// Every living backend by group name: what the Python face looks groups up in, because under TORCH_DISTRIBUTED_DEBUG=
// DETAIL a group holds a wrapper. Null when there is none.
c10::intrusive_ptr<LowcommBackend> findBackend(const std::string& group_name);
std::vector<std::string> backendNames();

// Before the interpreter goes: gives every living backend's threads `patience` altogether to end what they are at. A
// thread that lets go of a Python callback while the interpreter is finalised is unwound by it, and aborts the process.
void settleBackends(std::chrono::milliseconds patience);

}  // namespace lowcomm
