// What the inner backend serves, on the calling thread (gloo numbers collectives by order of issue): ops without a
// schedule of lowcomm's own, and those that travel exact.
#include <ATen/ATen.h>

#include "backend/backend.h"
#include "backend/errors.h"
#include "backend/premultiply.h"
#include "backend/prepared.h"
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

// The memory of a host tensor without the Python object that the caller's carries: gloo's worker drops what it was
// handed some time after the op has ended, and a thread that lets go of a Python object while the interpreter is
// finalised aborts the process.
at::Tensor bare(const at::Tensor& tensor) {
  const bool taken = tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
                     !tensor.unsafeGetTensorImpl()->is_python_dispatch();
  return taken ? tensor.tensor_data() : tensor;
}

Tensors bare(const Tensors& tensors) {
  Tensors taken;
  for (const auto& tensor : tensors)
    taken.push_back(bare(tensor));
  return taken;
}

// Gloo takes a tensor's memory for contiguous without looking. Others are replaced by contiguous copies for the call,
// and what the op wrote is copied back when it has succeeded.
class Contiguous {
 public:
  explicit Contiguous(const char* op) : op_(op) {}

  Tensors inputs(const Tensors& tensors) const {
    Tensors dense;
    for (const auto& tensor : tensors)
      dense.push_back(plain(tensor) ? bare(tensor) : tensor.contiguous());
    return dense;
  }

  Tensors outputs(const Tensors& tensors) {
    Tensors dense;
    for (const auto& tensor : tensors) {
      if (!plain(tensor)) checkOutput(op_, tensor);
      dense.push_back(plain(tensor) ? bare(tensor) : tensor.contiguous());
      if (!plain(tensor)) back_.emplace_back(tensor, dense.back());
    }
    return dense;
  }

  std::function<void()> finish() const {
    if (back_.empty()) return {};
    return [back = back_] {
      at::NoGradGuard no_grad;
      for (const auto& [to, from] : back)
        to.copy_(from);
    };
  }

 private:
  static bool plain(const at::Tensor& tensor) {
    return !tensor.defined() || tensor.layout() != at::kStrided || tensor.is_contiguous();
  }
  const char* const op_;
  std::vector<std::pair<at::Tensor, at::Tensor>> back_;  // (to, from)
};

}  // namespace

c10d::Backend& LowcommBackend::innerFor(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().is_cpu()) return *host_;
  BackendPtr device = forDevices();  // stays the group's
  return device ? *device : *host_;
}

WorkPtr LowcommBackend::viaInner(c10d::OpType op, const char* name, const Tensors& tensors, Tensors outputs,
                                 const std::function<WorkPtr(c10d::Backend&)>& call, bool collective,
                                 std::function<void()> finish, const std::string& detail) {
  expectLiving(name);
  c10d::Backend& inner = tensors.empty() ? *host_ : innerFor(tensors[0]);
  if (!tensors.empty() && tensors[0].defined() && &inner == host_.get()) expectNoCapture(name, tensors[0]);
  const uint64_t bytes = bytesOf(tensors);
  // Counted once the inner backend has taken the op: a call that it refuses on one rank must not part that rank's
  // numbers from the others'.
  const uint64_t sequence = sequence_ + (collective ? 1 : 0);
  InnerOp about = describeInner(name, sequence, detail + ", bytes handed over " + std::to_string(bytes));
  NoPythonObjects guard;
  std::exception_ptr error;
  try {
    WorkPtr served = call(inner);
    if (collective) sequence_ = sequence;
    stats_.inner(name, op == c10d::OpType::RECV || op == c10d::OpType::RECVANYSOURCE ? 0 : bytes);
    WorkPtr work = c10::make_intrusive<InnerWork>(std::move(served), op, rank_, sequence, about, std::move(outputs),
                                                  callbacks_, std::move(finish));
    if (coalesced_ && collective) coalesced_->add(work);
    return work;
  } catch (...) {
    error = about.failed(std::current_exception());
  }
  std::rethrow_exception(error);
}

// Gloo has no PREMUL_SUM: the factor is applied to this rank's contribution, in place, and the sum is exact as ever.
// What gloo would refuse is refused before anything is multiplied.
WorkPtr LowcommBackend::premultiplied(Tensors& tensors, const c10d::ReduceOp& op,
                                      const std::function<WorkPtr(const c10d::ReduceOp&)>& call) {
  if (tensors.empty() || &innerFor(tensors[0]) != host_.get()) return call(op);
  const std::optional<double> factor = premultiplyFactor(op);
  if (!factor) return call(op);
  for (const auto& tensor : tensors) {
    TORCH_CHECK_TYPE(at::isFloatingType(tensor.scalar_type()) && !c10::isFloat8Type(tensor.scalar_type()),
                     "lowcomm: PREMUL_SUM: expected float64, float32, float16 or bfloat16, got ", tensor.scalar_type());
  }
  expectLiving("PREMUL_SUM");
  at::NoGradGuard no_grad;
  for (auto& tensor : tensors)
    tensor.mul_(*factor);
  return call(c10d::ReduceOp(c10d::ReduceOp::SUM));
}

WorkPtr LowcommBackend::exactBroadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  Contiguous dense("broadcast");
  const bool sends = opts.rootRank == rank_ && tensors.size() == 1;  // only reads
  Tensors used = sends ? dense.inputs(tensors) : dense.outputs(tensors);
  return viaInner(
      c10d::OpType::BROADCAST, "broadcast", used, tensors,
      [&](c10d::Backend& inner) { return inner.broadcast(used, opts); }, true, dense.finish());
}

WorkPtr LowcommBackend::exactAllReduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  Contiguous dense("all_reduce");
  Tensors used = dense.outputs(tensors);
  return premultiplied(used, opts.reduceOp, [&](const c10d::ReduceOp& op) {
    c10d::AllreduceOptions changed = opts;
    changed.reduceOp = op;
    return viaInner(
        c10d::OpType::ALLREDUCE, "all_reduce", used, tensors,
        [&](c10d::Backend& inner) { return inner.allreduce(used, changed); }, true, dense.finish());
  });
}

WorkPtr LowcommBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return viaInner(c10d::OpType::_ALLREDUCE_SPARSE, "all_reduce", tensors, tensors,
                  [&](c10d::Backend& inner) { return inner.allreduce_sparse(tensors, opts); });
}

WorkPtr LowcommBackend::exactAllReduceCoalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  Contiguous dense("all_reduce");
  Tensors used = dense.outputs(tensors);
  return premultiplied(used, opts.reduceOp, [&](const c10d::ReduceOp& op) {
    c10d::AllreduceCoalescedOptions changed = opts;
    changed.reduceOp = op;
    return viaInner(
        c10d::OpType::ALLREDUCE_COALESCED, "all_reduce", used, tensors,
        [&](c10d::Backend& inner) { return inner.allreduce_coalesced(used, changed); }, true, dense.finish());
  });
}

WorkPtr LowcommBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  Contiguous dense("reduce");
  const bool root = opts.rootRank == rank_;
  Tensors used = root ? dense.outputs(tensors) : dense.inputs(tensors);
  if (opts.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM && !root) {
    for (auto& tensor : used)
      tensor = tensor.clone();  // only the root's tensor is an output
  }
  return premultiplied(used, opts.reduceOp, [&](const c10d::ReduceOp& op) {
    c10d::ReduceOptions changed = opts;
    changed.reduceOp = op;
    return viaInner(
        c10d::OpType::REDUCE, "reduce", used, tensors,
        [&](c10d::Backend& inner) { return inner.reduce(used, changed); }, true, dense.finish());
  });
}

WorkPtr LowcommBackend::exactGather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  Contiguous dense("gather");
  Tensors from = dense.inputs(inputs);
  std::vector<Tensors> to;
  for (const auto& list : outputs)
    to.push_back(dense.outputs(list));
  return viaInner(
      c10d::OpType::GATHER, "gather", from, outputs.empty() ? Tensors{} : outputs[0],
      [&](c10d::Backend& inner) { return inner.gather(to, from, opts); }, true, dense.finish());
}

WorkPtr LowcommBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  Contiguous dense("scatter");
  Tensors to = dense.outputs(outputs);
  std::vector<Tensors> from;
  for (const auto& list : inputs)
    from.push_back(dense.inputs(list));
  return viaInner(
      c10d::OpType::SCATTER, "scatter", to, outputs,
      [&](c10d::Backend& inner) { return inner.scatter(to, from, opts); }, true, dense.finish());
}

WorkPtr LowcommBackend::exactAllToAllBase(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                          std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) {
  checkOutputs("all_to_all", {output});
  at::Tensor to = bare(output), from = bare(input);
  return viaInner(c10d::OpType::ALLTOALL_BASE, "all_to_all", {input}, {output},
                  [&](c10d::Backend& inner) { return inner.alltoall_base(to, from, output_sizes, input_sizes, opts); });
}

WorkPtr LowcommBackend::exactAllToAll(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  checkOutputs("all_to_all", outputs);
  Tensors to = bare(outputs), from = bare(inputs);
  return viaInner(c10d::OpType::ALLTOALL, "all_to_all", inputs, outputs,
                  [&](c10d::Backend& inner) { return inner.alltoall(to, from, opts); });
}

WorkPtr LowcommBackend::barrier(const c10d::BarrierOptions& opts) {
  waitForPendingWorks();
  return viaInner(c10d::OpType::BARRIER, "barrier", {}, {}, [&](c10d::Backend& inner) { return inner.barrier(opts); });
}

void LowcommBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  waitForPendingWorks();
  expectLiving("monitored_barrier");
  const InnerOp about = describeInner("monitored_barrier", ++sequence_, "");
  NoPythonObjects guard;
  std::exception_ptr error;
  try {
    host_->monitoredBarrier(opts, wait_all_ranks);
    about.succeeded();
  } catch (...) {
    error = about.failed(std::current_exception(), /*always=*/true);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace lowcomm
