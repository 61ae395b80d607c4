// Ops that the inner backend serves, on the calling thread (gloo numbers collectives by order of issue).
#include <ATen/ATen.h>

#include "backend/backend.h"
#include "backend/errors.h"
#include "backend/premultiply.h"
#include "backend/python_state.h"

namespace lowcomm {
namespace {

uint64_t bytesOf(const Tensors& tensors) {
  uint64_t bytes = 0;
  for (const auto& tensor : tensors) {
    if (tensor.defined() && tensor.layout() == at::kStrided) bytes += tensor.nbytes();
  }
  return bytes;
}

}  // namespace

c10d::Backend& LowcommBackend::innerFor(const at::Tensor& tensor) const {
  if (!tensor.defined() || tensor.device().is_cpu() || !device_) return *host_;
  return *device_;
}

WorkPtr LowcommBackend::viaInner(c10d::OpType op, const char* name, const Tensors& tensors, Tensors outputs,
                                 const std::function<WorkPtr(c10d::Backend&)>& call, bool collective) {
  if (collective) ++sequence_;
  stats_.inner(name, bytesOf(tensors));
  c10d::Backend& inner = tensors.empty() ? *host_ : innerFor(tensors[0]);
  NoPythonObjects guard;
  std::exception_ptr error;
  try {
    WorkPtr work =
        c10::make_intrusive<InnerWork>(call(inner), op, rank_, sequence_.load(), context(name), std::move(outputs));
    if (coalesced_ && collective) coalesced_->add(work);
    return work;
  } catch (...) {
    error = asInnerError(std::current_exception(), context(name));
  }
  std::rethrow_exception(error);
}

// Gloo has no PREMUL_SUM: the factor is applied to this rank's contribution, in place, and the sum is exact as ever.
WorkPtr LowcommBackend::premultiplied(Tensors& tensors, const c10d::ReduceOp& op,
                                      const std::function<WorkPtr(const c10d::ReduceOp&)>& call) {
  if (tensors.empty() || &innerFor(tensors[0]) != host_.get()) return call(op);
  const std::optional<double> factor = premultiplyFactor(op);
  if (!factor) return call(op);
  at::NoGradGuard no_grad;
  for (auto& tensor : tensors)
    tensor.mul_(*factor);
  return call(c10d::ReduceOp(c10d::ReduceOp::SUM));
}

WorkPtr LowcommBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return viaInner(c10d::OpType::BROADCAST, "broadcast", tensors, tensors,
                  [&](c10d::Backend& inner) { return inner.broadcast(tensors, opts); });
}

WorkPtr LowcommBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return premultiplied(tensors, opts.reduceOp, [&](const c10d::ReduceOp& op) {
    c10d::AllreduceOptions changed = opts;
    changed.reduceOp = op;
    return viaInner(c10d::OpType::ALLREDUCE, "all_reduce", tensors, tensors,
                    [&](c10d::Backend& inner) { return inner.allreduce(tensors, changed); });
  });
}

WorkPtr LowcommBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return viaInner(c10d::OpType::_ALLREDUCE_SPARSE, "all_reduce", tensors, tensors,
                  [&](c10d::Backend& inner) { return inner.allreduce_sparse(tensors, opts); });
}

WorkPtr LowcommBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return premultiplied(tensors, opts.reduceOp, [&](const c10d::ReduceOp& op) {
    c10d::AllreduceCoalescedOptions changed = opts;
    changed.reduceOp = op;
    return viaInner(c10d::OpType::ALLREDUCE_COALESCED, "all_reduce", tensors, tensors,
                    [&](c10d::Backend& inner) { return inner.allreduce_coalesced(tensors, changed); });
  });
}

WorkPtr LowcommBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  Tensors contribution = tensors;
  if (opts.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM && opts.rootRank != rank_) {
    for (auto& tensor : contribution)
      tensor = tensor.clone();  // only the root's tensor is an output
  }
  return premultiplied(contribution, opts.reduceOp, [&](const c10d::ReduceOp& op) {
    c10d::ReduceOptions changed = opts;
    changed.reduceOp = op;
    return viaInner(c10d::OpType::REDUCE, "reduce", contribution, tensors,
                    [&](c10d::Backend& inner) { return inner.reduce(contribution, changed); });
  });
}

WorkPtr LowcommBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  return viaInner(c10d::OpType::GATHER, "gather", inputs, outputs.empty() ? Tensors{} : outputs[0],
                  [&](c10d::Backend& inner) { return inner.gather(outputs, inputs, opts); });
}

WorkPtr LowcommBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  return viaInner(c10d::OpType::SCATTER, "scatter", outputs, outputs,
                  [&](c10d::Backend& inner) { return inner.scatter(outputs, inputs, opts); });
}

WorkPtr LowcommBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) {
  return viaInner(c10d::OpType::ALLTOALL_BASE, "all_to_all", {input}, {output}, [&](c10d::Backend& inner) {
    return inner.alltoall_base(output, input, output_sizes, input_sizes, opts);
  });
}

WorkPtr LowcommBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  return viaInner(c10d::OpType::ALLTOALL, "all_to_all", inputs, outputs,
                  [&](c10d::Backend& inner) { return inner.alltoall(outputs, inputs, opts); });
}

WorkPtr LowcommBackend::barrier(const c10d::BarrierOptions& opts) {
  waitForPendingWorks();
  return viaInner(c10d::OpType::BARRIER, "barrier", {}, {}, [&](c10d::Backend& inner) { return inner.barrier(opts); });
}

void LowcommBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  waitForPendingWorks();
  ++sequence_;
  NoPythonObjects guard;
  std::exception_ptr error;
  try {
    host_->monitoredBarrier(opts, wait_all_ranks);
  } catch (...) {
    error = asInnerError(std::current_exception(), context("monitored_barrier"));
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace lowcomm
