// Every op of c10d leads from here to the file that is named after it.
#include "backend/backend.h"

namespace lowcomm {

using c10d::OpType;

WorkPtr BackendOps::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return parts_.blocks.run(OpType::ALLGATHER, [&] { return issueAllGather(parts_, outputs, inputs, opts); });
}

WorkPtr BackendOps::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  return parts_.blocks.run(OpType::_ALLGATHER_BASE, [&] { return issueAllGatherBase(parts_, output, input, opts); });
}

WorkPtr BackendOps::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& opts) {
  return parts_.blocks.run(OpType::ALLGATHER_COALESCED,
                           [&] { return issueAllGatherLists(parts_, outputs, inputs, opts); });
}

WorkPtr BackendOps::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& opts) {
  return parts_.blocks.run(OpType::COALESCED, [&] { return issueAllGatherCoalesced(parts_, outputs, inputs, opts); });
}

WorkPtr BackendOps::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ReduceScatterOptions& opts) {
  return parts_.blocks.run(OpType::REDUCE_SCATTER, [&] { return issueReduceScatter(parts_, outputs, inputs, opts); });
}

WorkPtr BackendOps::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::ReduceScatterOptions& opts) {
  return parts_.blocks.run(OpType::_REDUCE_SCATTER_BASE,
                           [&] { return issueReduceScatterBase(parts_, output, input, opts); });
}

WorkPtr BackendOps::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& opts) {
  return parts_.blocks.run(OpType::COALESCED,
                           [&] { return issueReduceScatterCoalesced(parts_, outputs, inputs, opts); });
}

WorkPtr BackendOps::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return parts_.blocks.run(OpType::ALLREDUCE, [&] { return issueAllReduce(parts_, tensors, opts); });
}

WorkPtr BackendOps::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return parts_.blocks.run(OpType::_ALLREDUCE_SPARSE, [&] { return issueAllReduceSparse(parts_, tensors, opts); });
}

WorkPtr BackendOps::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return parts_.blocks.run(OpType::ALLREDUCE_COALESCED, [&] { return issueAllReduceCoalesced(parts_, tensors, opts); });
}

WorkPtr BackendOps::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return parts_.blocks.run(OpType::REDUCE, [&] { return issueReduce(parts_, tensors, opts); });
}

WorkPtr BackendOps::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                  std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) {
  return parts_.blocks.run(OpType::ALLTOALL_BASE,
                           [&] { return issueAllToAllBase(parts_, output, input, output_sizes, input_sizes, opts); });
}

WorkPtr BackendOps::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  return parts_.blocks.run(OpType::ALLTOALL, [&] { return issueAllToAll(parts_, outputs, inputs, opts); });
}

WorkPtr BackendOps::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return parts_.blocks.run(OpType::BROADCAST, [&] { return issueBroadcast(parts_, tensors, opts); });
}

WorkPtr BackendOps::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  return parts_.blocks.run(OpType::GATHER, [&] { return issueGather(parts_, outputs, inputs, opts); });
}

WorkPtr BackendOps::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  return parts_.blocks.run(OpType::SCATTER, [&] { return issueScatter(parts_, outputs, inputs, opts); });
}

WorkPtr BackendOps::barrier(const c10d::BarrierOptions&) {
  return parts_.blocks.run(OpType::BARRIER, [&] { return issueBarrier(parts_); });
}

void BackendOps::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  runMonitoredBarrier(parts_, opts, wait_all_ranks);
}

WorkPtr BackendOps::send(Tensors& tensors, int to, int tag) {
  return parts_.blocks.run(OpType::SEND, [&] { return messages_.send(tensors, to, tag); });
}

WorkPtr BackendOps::recv(Tensors& tensors, int from, int tag) {
  return parts_.blocks.run(OpType::RECV, [&] { return messages_.recv(tensors, from, tag); });
}

WorkPtr BackendOps::recvAnysource(Tensors& tensors, int tag) {
  return parts_.blocks.run(OpType::RECVANYSOURCE, [&] { return messages_.recvAnysource(tensors, tag); });
}

WorkPtr BackendOps::allReduceCoded(const at::Tensor& tensor, const c10d::ReduceOp& op, const CodecSpec& codec,
                                   std::shared_ptr<Residual> residual) {
  return parts_.blocks.run(OpType::ALLREDUCE,
                           [&] { return issueCodedAllReduce(parts_, tensor, op, codec, std::move(residual)); });
}

WorkPtr BackendOps::allReduceLowRank(const Tensors& tensors, const c10d::ReduceOp& op, const CodecSpec& codec,
                                     const CodecSpec& projection,
                                     const std::vector<std::shared_ptr<Compression>>& states,
                                     const std::vector<uint64_t>& slots, const std::vector<uint32_t>& owners,
                                     uint32_t step) {
  return parts_.blocks.run(OpType::ALLREDUCE, [&] {
    return issueLowRankAllReduce(parts_, tensors, op, codec, projection, states, slots, owners, step);
  });
}

WorkPtr BackendOps::allGatherLayout(const at::Tensor& output, const at::Tensor& input, const Layout& layout,
                                    Counter counter) {
  return parts_.blocks.run(OpType::_ALLGATHER_BASE,
                           [&] { return issueAllGatherLayout(parts_, output, input, layout, counter); });
}

WorkPtr BackendOps::reduceScatterLayout(const at::Tensor& output, const at::Tensor& input, const Layout& layout,
                                        const c10d::ReduceOp& op, Counter counter) {
  return parts_.blocks.run(OpType::_REDUCE_SCATTER_BASE,
                           [&] { return issueReduceScatterLayout(parts_, output, input, layout, op, counter); });
}

}  // namespace lowcomm
