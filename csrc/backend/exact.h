#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <functional>
#include <optional>

#include "backend/group_parts.h"
#include "collective/summer.h"

namespace lowcomm {

// c10d's ops as the inner backend serves them: those without a schedule of lowcomm's own, and those that travel exact.
// Arguments, results and errors are c10d's. Called inside Coalescing::run(), but exactMonitoredBarrier(). Where no
// inner backend takes the tensors (transport="tcp") NotImplementedError names the op, but what lowcomm carries never
// comes here.
WorkPtr exactBroadcast(GroupParts& parts, Tensors& tensors, const c10d::BroadcastOptions& opts);
WorkPtr exactAllReduce(GroupParts& parts, Tensors& tensors, const c10d::AllreduceOptions& opts);
WorkPtr exactAllReduceSparse(GroupParts& parts, Tensors& tensors, const c10d::AllreduceOptions& opts);
WorkPtr exactAllReduceCoalesced(GroupParts& parts, Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts);
WorkPtr exactReduce(GroupParts& parts, Tensors& tensors, const c10d::ReduceOptions& opts);
WorkPtr exactGather(GroupParts& parts, std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts);
WorkPtr exactScatter(GroupParts& parts, Tensors& outputs, std::vector<Tensors>& inputs,
                     const c10d::ScatterOptions& opts);
WorkPtr exactAllToAllBase(GroupParts& parts, at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                          std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts);
WorkPtr exactAllToAll(GroupParts& parts, Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts);
WorkPtr exactBarrier(GroupParts& parts, const c10d::BarrierOptions& opts);

// A device's tensors for an op that gloo takes from the host alone, and reads at a device's address without a look.
struct HostCopies {
  Tensors tensors;
  std::function<void()> finish;  // copies back what the op wrote
};
// Contiguous ones; nothing if the tensors are on the host, or their device has a backend of its own. The op reads and
// writes them, or only does one of both.
enum class Touches { reads, writes, both };
std::optional<HostCopies> hostCopies(GroupParts& parts, const char* op, const Tensors& tensors, Touches touches);

// Blocks until all ranks are there; a rank that does not come is a fault of the group.
void exactMonitoredBarrier(GroupParts& parts, const c10d::BarrierOptions& opts, bool wait_all_ranks);

// The reduction that the exchange does by itself; nothing for the rest, which are the inner backend's.
std::optional<Reduction> ownReduction(const c10d::ReduceOp& op, at::ScalarType type);

// Complex tensors as twice as many real numbers, where the reduction does the same to both parts (sums); others as they
// are.
Tensors asReal(const Tensors& tensors, const c10d::ReduceOp& op);

// The factor of a PREMUL_SUM, by which every rank multiplies its contribution; nothing for other ops. Reads the tensor
// that holds it, so a device's is waited for.
std::optional<double> premultiplyFactor(const c10d::ReduceOp& op);

// As a description names it: "sum", "avg", "premul_sum", "band", ...
const char* reduceOpName(const c10d::ReduceOp& op);

}  // namespace lowcomm
