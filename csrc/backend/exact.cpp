#include "backend/exact.h"

#include <utility>

#include "kernels/reduce.h"
#include "tensor/errors.h"
#include "tensor/python_state.h"
#include "tensor/wire_type.h"

namespace lowcomm {

namespace {

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

// A reduction as the inner backend of the tensors has it, after multiply().
struct HostReduction {
  c10d::ReduceOp op;
  std::optional<double> factor;

  void multiply(Tensors& tensors) const {
    at::NoGradGuard no_grad;
    for (auto& tensor : tensors) {
      if (factor) tensor.mul_(*factor);
    }
  }
};

// Gloo has no PREMUL_SUM: the factor is applied to this rank's contribution, in place, when the op starts, and the sum
// is exact as ever. What gloo would refuse is refused before anything is multiplied.
HostReduction hostReduction(GroupParts& parts, const Tensors& tensors, const c10d::ReduceOp& op) {
  if (tensors.empty() || parts.backends.of(tensors[0]) != parts.backends.host()) return {op, std::nullopt};
  const std::optional<double> factor = premultiplyFactor(op);
  if (!factor) return {op, std::nullopt};
  for (const auto& tensor : tensors) {
    TORCH_CHECK_TYPE(at::isFloatingType(tensor.scalar_type()) && !c10::isFloat8Type(tensor.scalar_type()),
                     "lowcomm: PREMUL_SUM: expected float64, float32, float16 or bfloat16, got ", tensor.scalar_type());
  }
  return {c10d::ReduceOp(c10d::ReduceOp::SUM), factor};
}

// The arithmetic of a reduction; sum for AVG and PREMUL_SUM, whose factors ownReduction() adds.
std::optional<ReduceKind> kindOf(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG:
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceKind::sum;
    case c10d::ReduceOp::PRODUCT:
      return ReduceKind::product;
    case c10d::ReduceOp::MIN:
      return ReduceKind::min;
    case c10d::ReduceOp::MAX:
      return ReduceKind::max;
    case c10d::ReduceOp::BAND:
      return ReduceKind::bit_and;
    case c10d::ReduceOp::BOR:
      return ReduceKind::bit_or;
    case c10d::ReduceOp::BXOR:
      return ReduceKind::bit_xor;
    default:
      return std::nullopt;
  }
}

// Issues an all_reduce of `tensors`, dense copies of which, or `copies`, the inner backend reduces by its method
// `kCall`.
template <auto kCall, class Options>
WorkPtr allReduced(GroupParts& parts, c10d::OpType type, Tensors& tensors, const Options& opts,
                   const std::optional<HostCopies>& copies = {}) {
  Contiguous dense("all_reduce");
  Tensors used = copies ? copies->tensors : dense.outputs(tensors);
  const HostReduction reduction = hostReduction(parts, used, opts.reduceOp);
  return parts.inner.issue({type, "all_reduce", used, tensors,
                            parts.inner.describe("all_reduce", tensors, {{"reduce op", reduceOpName(opts.reduceOp)}}),
                            copies ? copies->finish : dense.finish()},
                           [used, changed = opts, reduction](c10d::Backend& inner) mutable {
                             reduction.multiply(used);
                             changed.reduceOp = reduction.op;
                             return (inner.*kCall)(used, changed);
                           });
}

}  // namespace

WorkPtr exactBroadcast(GroupParts& parts, Tensors& tensors, const c10d::BroadcastOptions& opts) {
  Contiguous dense("broadcast");
  const bool sends = opts.rootRank == parts.group.rank && tensors.size() == 1;  // only reads
  Tensors used = sends ? dense.inputs(tensors) : dense.outputs(tensors);
  return parts.inner.issue(
      {c10d::OpType::BROADCAST, "broadcast", used, tensors,
       parts.inner.describe("broadcast", tensors, {{"root", std::to_string(opts.rootRank)}}), dense.finish()},
      [used, opts](c10d::Backend& inner) mutable { return inner.broadcast(used, opts); });
}

WorkPtr exactAllReduce(GroupParts& parts, Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return allReduced<&c10d::Backend::allreduce>(parts, c10d::OpType::ALLREDUCE, tensors, opts);
}

WorkPtr exactAllReduceSparse(GroupParts& parts, Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return parts.inner.issue(
      {c10d::OpType::_ALLREDUCE_SPARSE, "all_reduce", tensors, tensors},
      [tensors, opts](c10d::Backend& inner) mutable { return inner.allreduce_sparse(tensors, opts); });
}

WorkPtr exactAllReduceCoalesced(GroupParts& parts, Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return allReduced<&c10d::Backend::allreduce_coalesced>(parts, c10d::OpType::ALLREDUCE_COALESCED, tensors, opts,
                                                         hostCopies(parts, "all_reduce", tensors, Touches::both));
}

std::optional<HostCopies> hostCopies(GroupParts& parts, const char* op, const Tensors& tensors, Touches touches) {
  if (tensors.empty() || tensors[0].device().is_cpu() || parts.backends.of(tensors[0]) != parts.backends.host())
    return std::nullopt;
  HostCopies copies;
  for (const at::Tensor& tensor : tensors) {
    expectNoCapture(parts.group, op, tensor);
    const auto host = tensor.options().device(at::kCPU);
    copies.tensors.push_back(touches == Touches::writes ? at::empty(tensor.sizes(), host)
                                                        : tensor.to(at::kCPU).contiguous());
  }
  if (touches != Touches::reads) {
    copies.finish = [tensors, copied = copies.tensors] {
      at::NoGradGuard no_grad;
      for (size_t i = 0; i < tensors.size(); ++i)
        at::Tensor(tensors[i]).copy_(copied[i]);
    };
  }
  return copies;
}

WorkPtr exactReduce(GroupParts& parts, Tensors& tensors, const c10d::ReduceOptions& opts) {
  Contiguous dense("reduce");
  const bool root = opts.rootRank == parts.group.rank;
  Tensors used = root ? dense.outputs(tensors) : dense.inputs(tensors);
  if (opts.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM && !root) {
    for (auto& tensor : used)
      tensor = tensor.clone();  // only the root's tensor is an output
  }
  const HostReduction reduction = hostReduction(parts, used, opts.reduceOp);
  return parts.inner.issue({c10d::OpType::REDUCE, "reduce", used, tensors, {}, dense.finish()},
                           [used, changed = opts, reduction](c10d::Backend& inner) mutable {
                             reduction.multiply(used);
                             changed.reduceOp = reduction.op;
                             return inner.reduce(used, changed);
                           });
}

WorkPtr exactGather(GroupParts& parts, std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::GatherOptions& opts) {
  Contiguous dense("gather");
  Tensors from = dense.inputs(inputs);
  std::vector<Tensors> to;
  for (const auto& list : outputs)
    to.push_back(dense.outputs(list));
  return parts.inner.issue(
      {c10d::OpType::GATHER, "gather", from, outputs.empty() ? Tensors{} : outputs[0],
       parts.inner.describe("gather", inputs, {{"root", std::to_string(opts.rootRank)}}), dense.finish()},
      [to, from, opts](c10d::Backend& inner) mutable { return inner.gather(to, from, opts); });
}

WorkPtr exactScatter(GroupParts& parts, Tensors& outputs, std::vector<Tensors>& inputs,
                     const c10d::ScatterOptions& opts) {
  Contiguous dense("scatter");
  Tensors to = dense.outputs(outputs);
  std::vector<Tensors> from;
  for (const auto& list : inputs)
    from.push_back(dense.inputs(list));
  return parts.inner.issue({c10d::OpType::SCATTER, "scatter", to, outputs, {}, dense.finish()},
                           [to, from, opts](c10d::Backend& inner) mutable { return inner.scatter(to, from, opts); });
}

WorkPtr exactAllToAllBase(GroupParts& parts, at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                          std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) {
  checkOutputs("all_to_all", {output});
  return parts.inner.issue(
      {c10d::OpType::ALLTOALL_BASE, "all_to_all", {input}, {output}, parts.inner.describe("all_to_all", {input})},
      [to = bare(output), from = bare(input), output_sizes, input_sizes, opts](c10d::Backend& inner) mutable {
        return inner.alltoall_base(to, from, output_sizes, input_sizes, opts);
      });
}

WorkPtr exactAllToAll(GroupParts& parts, Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  checkOutputs("all_to_all", outputs);
  return parts.inner.issue(
      {c10d::OpType::ALLTOALL, "all_to_all", inputs, outputs, parts.inner.describe("all_to_all", inputs)},
      [to = bare(outputs), from = bare(inputs), opts](c10d::Backend& inner) mutable {
        return inner.alltoall(to, from, opts);
      });
}

WorkPtr exactBarrier(GroupParts& parts, const c10d::BarrierOptions& opts) {
  return parts.inner.issue({c10d::OpType::BARRIER, "barrier", {}, {}},
                           [opts](c10d::Backend& inner) { return inner.barrier(opts); });
}

void exactMonitoredBarrier(GroupParts& parts, const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  parts.blocks.startPutOff();
  parts.inner.waitForAll();
  parts.group.expectLiving("monitored_barrier");
  const InnerOpAccount about = parts.inner.accountOf("monitored_barrier", parts.blocks.takeNumbers(1), "");
  NoPythonObjects guard;
  std::exception_ptr error;
  try {
    parts.backends.host()->monitoredBarrier(opts, wait_all_ranks);
    about.succeeded();
  } catch (...) {
    error = about.failed(std::current_exception(), /*always=*/true);
  }
  if (error) std::rethrow_exception(error);
}

std::optional<double> premultiplyFactor(const c10d::ReduceOp& op) {
  // The name that 2.11 has and later versions keep.
  const auto* given = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM || !given) return std::nullopt;
  return given->tensor_factor.defined() ? given->tensor_factor.item<double>() : given->double_factor;
}

Tensors asReal(const Tensors& tensors, const c10d::ReduceOp& op) {
  const bool sums =
      op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG || op.op_ == c10d::ReduceOp::PREMUL_SUM;
  Tensors real;
  for (const auto& tensor : tensors) {
    const bool seen = sums && tensor.is_complex() && tensor.layout() == at::kStrided && !tensor.is_conj();
    real.push_back(seen ? at::view_as_real(tensor) : tensor);
  }
  return real;
}

std::optional<Reduction> ownReduction(const c10d::ReduceOp& op, at::ScalarType type) {
  const std::optional<ReduceKind> kind = kindOf(op);
  if (!kind || !reduceSupports(wireType(type), *kind)) return std::nullopt;
  Reduction reduction;
  reduction.kind = *kind;
  reduction.average = op.op_ == c10d::ReduceOp::AVG;
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    const std::optional<double> factor = premultiplyFactor(op);
    if (!factor || !at::isFloatingType(type)) return std::nullopt;
    reduction.premultiplied = true;
    reduction.premultiply = *factor;
  }
  return reduction;
}

const char* reduceOpName(const c10d::ReduceOp& op) {
  if (op.op_ == c10d::ReduceOp::AVG) return "avg";
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) return "premul_sum";
  const std::optional<ReduceKind> kind = kindOf(op);
  return kind ? reduceName(*kind) : "another";
}

}  // namespace lowcomm
