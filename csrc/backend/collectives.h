#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/group_parts.h"
#include "tensor/compression.h"
#include "wire/layout.h"

namespace lowcomm {

// The collectives of c10d. Each checks its arguments, chooses codecs, takes the op's number and submits it. CUDA
// tensors that the policy does not name go to the inner backend where the group has one; what nothing carries is
// refused (InnerOps). Arguments and results are c10d's. ValueError, TypeError or NotImplementedError before anything is
// sent. All are called inside Coalescing::run().

// ---- all_gather in every form of c10d (all_gather.cpp) ----
WorkPtr issueAllGather(GroupParts& parts, std::vector<Tensors>& outputs, Tensors& inputs,
                       const c10d::AllgatherOptions& opts);
WorkPtr issueAllGatherBase(GroupParts& parts, at::Tensor& output, at::Tensor& input,
                           const c10d::AllgatherOptions& opts);
// all_gather of several tensors, with a list of outputs for each rank.
WorkPtr issueAllGatherLists(GroupParts& parts, std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& opts);
// all_gather of several tensors, each into one output.
WorkPtr issueAllGatherCoalesced(GroupParts& parts, Tensors& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts);
// all_gather of a flat buffer whose layout was agreed: [n] into [size·n], one message, each segment by its own codec.
WorkPtr issueAllGatherLayout(GroupParts& parts, const at::Tensor& output, const at::Tensor& input, const Layout& layout,
                             Counter counter);

// ---- reduce_scatter in every form of c10d (reduce_scatter.cpp) ----
WorkPtr issueReduceScatter(GroupParts& parts, Tensors& outputs, std::vector<Tensors>& inputs,
                           const c10d::ReduceScatterOptions& opts);
WorkPtr issueReduceScatterBase(GroupParts& parts, at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts);
WorkPtr issueReduceScatterCoalesced(GroupParts& parts, Tensors& outputs, Tensors& inputs,
                                    const c10d::ReduceScatterOptions& opts);
// reduce_scatter of a flat buffer [size·n] into [n], whose slices have the agreed layout.
WorkPtr issueReduceScatterLayout(GroupParts& parts, const at::Tensor& output, const at::Tensor& input,
                                 const Layout& layout, const c10d::ReduceOp& op, Counter counter);

// ---- all_reduce (all_reduce.cpp) ----
WorkPtr issueAllReduce(GroupParts& parts, Tensors& tensors, const c10d::AllreduceOptions& opts);
WorkPtr issueAllReduceCoalesced(GroupParts& parts, Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts);
// all_reduce of one dense tensor by a codec that the caller names, regardless of the policy, min_bytes and lc.exact();
// with error feedback if `residual` is not null. SUM, AVG, or (without a residual) PREMUL_SUM. Errors: another op,
// dtype or codec, a residual of another size or in use.
WorkPtr issueCodedAllReduce(GroupParts& parts, const at::Tensor& tensor, const c10d::ReduceOp& op,
                            const CodecSpec& codec, std::shared_ptr<Residual> residual);

// ---- all_reduce by codes and low-rank factors (all_reduce.cpp) ----
// Of tensors in one message or, where a state has a rank, in two (collective/all_reduce.h), whatever policy
// and lc.exact() say. Of each tensor: its slot in the draws, of which it takes 2 a rank of the group, and the rank,
// modulo their number, that sums its first slice; by these its bits are the same whatever it travels with. `projection`
// is P's codec. When the Work ends each state's done() tells whether the result is finite, and the caller commits or
// rolls back. Errors: tensors, op, codecs (they have nonfinite=poison) or states that will not do.
WorkPtr issueLowRankAllReduce(GroupParts& parts, const Tensors& tensors, const c10d::ReduceOp& op,
                              const CodecSpec& codec, const CodecSpec& projection,
                              const std::vector<std::shared_ptr<Compression>>& states,
                              const std::vector<uint64_t>& slots, const std::vector<uint32_t>& owners, uint32_t step);

// all_reduce of sparse tensors on the host: the sum of all, coalesced, in rank order (sparse.cpp).
WorkPtr issueAllReduceSparse(GroupParts& parts, Tensors& tensors, const c10d::AllreduceOptions& opts);

// ---- all_to_all (all_to_all.cpp) ----
WorkPtr issueAllToAllBase(GroupParts& parts, at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                          std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts);
WorkPtr issueAllToAll(GroupParts& parts, Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts);

// ---- ops with a root (rooted.cpp) ----
WorkPtr issueBroadcast(GroupParts& parts, Tensors& tensors, const c10d::BroadcastOptions& opts);
WorkPtr issueGather(GroupParts& parts, std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts);
WorkPtr issueReduce(GroupParts& parts, Tensors& tensors, const c10d::ReduceOptions& opts);
WorkPtr issueScatter(GroupParts& parts, Tensors& outputs, std::vector<Tensors>& inputs,
                     const c10d::ScatterOptions& opts);

// ---- barriers (barrier.cpp) ----
WorkPtr issueBarrier(GroupParts& parts);
// Blocks until all ranks are there; a rank that does not come is a fault of the group.
void runMonitoredBarrier(GroupParts& parts, const c10d::BarrierOptions& opts, bool wait_all_ranks);

// Agreements of a group's ranks on what was not known when the group was made. Collective; DistBackendError names the
// first value that differs and where.

// Changes the policy of a living group. Throws ValueError where this rank's text is wrong, and when it throws nothing
// has changed. Ops issued before keep the old policy.
void setPolicy(GroupParts& parts, const std::string& text);

// On named layouts. `error`, unless it is empty, is what keeps this rank from taking part: the peers get it as theirs,
// this one returns.
void agreeOnLayouts(GroupParts& parts, const std::vector<std::pair<std::string, Layout>>& layouts,
                    const std::string& error);

// agreeOnLayouts() for any named texts, such as a hook's options; `what` begins the messages.
void agreeOnTexts(GroupParts& parts, const std::string& what, std::vector<std::pair<std::string, std::string>> fields,
                  const std::string& error);

// send and recv: on lowcomm's own lane, encoded or exact, or served by the inner backend (as collectives). Messages of
// lowcomm's own are sent and posted by the caller and finished by the thread that waits.
class PointToPoint {
 public:
  // `parts` outlive this.
  explicit PointToPoint(GroupParts& parts) : parts_(parts) {}

  // Arguments and results are c10d's. Called inside Coalescing::run().
  WorkPtr send(Tensors& tensors, int to, int tag);
  WorkPtr recv(Tensors& tensors, int from, int tag);
  WorkPtr recvAnysource(Tensors& tensors, int tag);

 private:
  struct P2pRequest;
  struct P2pInFlight;
  using Exact = std::function<WorkPtr(c10d::Backend& inner, Tensors& tensors)>;

  WorkPtr exactOrCoded(c10d::OpType op, const Tensors& tensors, int peer, int tag, Exact call);
  void checkPeer(const char* name, int peer) const;
  void checkExact(c10d::OpType op, const Tensors& tensors, int peer, int tag) const;
  std::shared_ptr<P2pRequest> requestOf(c10d::OpType type, const Tensors& tensors, int peer, int tag);
  void prepare(P2pRequest& message);
  WorkPtr post(const std::shared_ptr<P2pRequest>& request);
  void finish(P2pInFlight& flight);

  GroupParts& parts_;
};

}  // namespace lowcomm
