// What the inner backend serves: ops without a schedule of lowcomm's own, and those that travel exact. They run on the
// calling thread, or on the worker where ranks compare the op first or another such op is queued, for gloo numbers
// collectives by order of issue.
#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>

#include <algorithm>

#include "backend/backend.h"
#include "backend/own_reduction.h"
#include "backend/premultiply.h"
#include "collective/exchange.h"
#include "tensor/errors.h"
#include "tensor/op_checks.h"
#include "tensor/python_state.h"

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

Exchange exchangeOf(const KeyValues& description) {
  Exchange exchange;
  exchange.description = description;
  return exchange;
}

}  // namespace

BackendPtr LowcommBackend::innerFor(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().is_cpu()) return host_;
  BackendPtr device = forDevices();
  return device ? device : host_;
}

WorkPtr LowcommBackend::viaInner(InnerCall op, std::function<WorkPtr(c10d::Backend&)> call) {
  expectLiving(op.name);
  op.inner = op.tensors.empty() ? host_ : innerFor(op.tensors[0]);
  if (!op.tensors.empty() && op.tensors[0].defined() && op.inner == host_) expectNoCapture(op.name, op.tensors[0]);
  op.bytes = bytesOf(op.tensors);
  op.sequence = sequence_ + (op.collective ? 1 : 0);
  const bool put_off = op.collective && block_;
  // Without a description it is counted once the inner backend has taken the op: a call that it refuses on one rank
  // must not part that rank's numbers from the others'. A block takes back what it did not start.
  if (op.description || put_off) sequence_ = op.sequence;
  if (!put_off) return callInner(op, call);
  return putOff(op.type, op.sequence,
                [backend = living(op.name), op, call = std::move(call)] { return backend()->callInner(op, call); });
}

WorkPtr LowcommBackend::callInner(const InnerCall& op, const std::function<WorkPtr(c10d::Backend&)>& call) {
  expectLiving(op.name);
  if (op.type == c10d::OpType::BARRIER) waitForPendingWorks();
  // Gloo numbers collectives by order of issue: one that is issued behind a queued one is queued too.
  if (op.collective && op.inner == host_ && (op.description || queued_inner_ > 0)) {
    if (op.tensors.empty() || !op.tensors[0].defined() || op.tensors[0].device().is_cpu()) return queueInner(op, call);
    // A device's tensors are read in the order of the caller's stream.
    waitForPendingWorks();
  }
  if (op.description) {
    runAndWait(op.name, op.sequence,
               [exchange = exchangeOf(*op.description)](OpContext& context) { runExchange(context, exchange); });
  }
  InnerOpAccount about = accountOf(op.name, op.sequence, op.detail + ", bytes handed over " + std::to_string(op.bytes));
  NoPythonObjects guard;
  std::exception_ptr error;
  try {
    WorkPtr served = call(*op.inner);
    if (op.collective) sequence_ = std::max(sequence_.load(), op.sequence);
    stats_.inner(op.name, op.type == c10d::OpType::RECV || op.type == c10d::OpType::RECVANYSOURCE ? 0 : op.bytes);
    return c10::make_intrusive<InnerWork>(std::move(served), op.type, rank_, op.sequence, about, op.outputs, callbacks_,
                                          op.finish);
  } catch (...) {
    error = about.failed(std::current_exception());
  }
  std::rethrow_exception(error);
}

// On the worker, so that a caller who does not wait for the op does not wait for its description either.
WorkPtr LowcommBackend::queueInner(const InnerCall& op, const std::function<WorkPtr(c10d::Backend&)>& call) {
  auto work = c10::make_intrusive<EngineWork>(rank_, op.type, profilerTitle(options_->name, op.name),
                                              EngineWork::Name{op.name, groupName(), op.sequence}, op.tensors,
                                              op.outputs, callbacks_);
  sequence_ = std::max(sequence_.load(), op.sequence);
  NoPythonObjects guard;
  struct Queued {
    InnerCall op;
    std::function<WorkPtr(c10d::Backend&)> call;
    at::ThreadLocalState state = {};
  };
  const auto queued = std::make_shared<std::optional<Queued>>(Queued{op, call});
  ++queued_inner_;
  engine().submit(
      op.name,
      [this, queued](OpContext& context) {
        at::ThreadLocalStateGuard restored((*queued)->state);
        runInner((*queued)->op, (*queued)->call, context);
      },
      [this, queued, work](std::exception_ptr error, const OpCounters&) {
        --queued_inner_;
        queued->reset();  // its tensors go before anybody is told
        work->complete(asTorchError(error));
      },
      static_cast<uint32_t>(op.sequence));
  return work;
}

void LowcommBackend::runInner(const InnerCall& op, const std::function<WorkPtr(c10d::Backend&)>& call,
                              OpContext& context) {
  constexpr std::chrono::milliseconds kGlance{200};  // how often the end of the group is looked for
  if (op.description) runExchange(context, exchangeOf(*op.description));
  context.whole = true;  // what the inner backend meets ends the group by InnerOpAccount::failed()
  InnerOpAccount about =
      accountOf(op.name, op.sequence, op.detail + ", bytes handed over " + std::to_string(op.bytes), context.progress);
  std::exception_ptr error;
  try {
    WorkPtr served = call(*op.inner);
    stats_.inner(op.name, op.bytes);
    for (bool waiting = true; waiting;) {
      try {
        waiting = !served->wait(kGlance);
      } catch (...) {
        if (served->isCompleted()) {
          served->wait(kNoTimeout);  // its own error, if it has one
          waiting = false;
        } else if (!engine_->endedWhy().empty()) {
          throw;
        }
      }
    }
    if (op.finish) op.finish();
  } catch (...) {
    error = about.failed(std::current_exception());
  }
  if (error) std::rethrow_exception(error);
}

// Gloo has no PREMUL_SUM: the factor is applied to this rank's contribution, in place, when the op starts, and the sum
// is exact as ever. What gloo would refuse is refused before anything is multiplied.
LowcommBackend::HostReduction LowcommBackend::hostReduction(const Tensors& tensors, const c10d::ReduceOp& op) {
  if (tensors.empty() || innerFor(tensors[0]) != host_) return {op, std::nullopt};
  const std::optional<double> factor = premultiplyFactor(op);
  if (!factor) return {op, std::nullopt};
  for (const auto& tensor : tensors) {
    TORCH_CHECK_TYPE(at::isFloatingType(tensor.scalar_type()) && !c10::isFloat8Type(tensor.scalar_type()),
                     "lowcomm: PREMUL_SUM: expected float64, float32, float16 or bfloat16, got ", tensor.scalar_type());
  }
  return {c10d::ReduceOp(c10d::ReduceOp::SUM), factor};
}

void LowcommBackend::HostReduction::multiply(Tensors& tensors) const {
  at::NoGradGuard no_grad;
  for (auto& tensor : tensors) {
    if (factor) tensor.mul_(*factor);
  }
}

WorkPtr LowcommBackend::exactBroadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  Contiguous dense("broadcast");
  const bool sends = opts.rootRank == rank_ && tensors.size() == 1;  // only reads
  Tensors used = sends ? dense.inputs(tensors) : dense.outputs(tensors);
  return viaInner({c10d::OpType::BROADCAST, "broadcast", used, tensors,
                   describeForInner("broadcast", tensors, {{"root", std::to_string(opts.rootRank)}}), dense.finish()},
                  [used, opts](c10d::Backend& inner) mutable { return inner.broadcast(used, opts); });
}

WorkPtr LowcommBackend::exactAllReduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  Contiguous dense("all_reduce");
  Tensors used = dense.outputs(tensors);
  const HostReduction reduction = hostReduction(used, opts.reduceOp);
  return viaInner(
      {c10d::OpType::ALLREDUCE, "all_reduce", used, tensors,
       describeForInner("all_reduce", tensors, {{"reduce op", reduceOpName(opts.reduceOp)}}), dense.finish()},
      [used, changed = opts, reduction](c10d::Backend& inner) mutable {
        reduction.multiply(used);
        changed.reduceOp = reduction.op;
        return inner.allreduce(used, changed);
      });
}

WorkPtr LowcommBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return inBlock(c10d::OpType::_ALLREDUCE_SPARSE, [&] {
    return viaInner({c10d::OpType::_ALLREDUCE_SPARSE, "all_reduce", tensors, tensors},
                    [tensors, opts](c10d::Backend& inner) mutable { return inner.allreduce_sparse(tensors, opts); });
  });
}

WorkPtr LowcommBackend::exactAllReduceCoalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  Contiguous dense("all_reduce");
  Tensors used = dense.outputs(tensors);
  const HostReduction reduction = hostReduction(used, opts.reduceOp);
  return viaInner(
      {c10d::OpType::ALLREDUCE_COALESCED, "all_reduce", used, tensors,
       describeForInner("all_reduce", tensors, {{"reduce op", reduceOpName(opts.reduceOp)}}), dense.finish()},
      [used, changed = opts, reduction](c10d::Backend& inner) mutable {
        reduction.multiply(used);
        changed.reduceOp = reduction.op;
        return inner.allreduce_coalesced(used, changed);
      });
}

WorkPtr LowcommBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return inBlock(c10d::OpType::REDUCE, [&] {
    Contiguous dense("reduce");
    const bool root = opts.rootRank == rank_;
    Tensors used = root ? dense.outputs(tensors) : dense.inputs(tensors);
    if (opts.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM && !root) {
      for (auto& tensor : used)
        tensor = tensor.clone();  // only the root's tensor is an output
    }
    const HostReduction reduction = hostReduction(used, opts.reduceOp);
    return viaInner({c10d::OpType::REDUCE, "reduce", used, tensors, {}, dense.finish()},
                    [used, changed = opts, reduction](c10d::Backend& inner) mutable {
                      reduction.multiply(used);
                      changed.reduceOp = reduction.op;
                      return inner.reduce(used, changed);
                    });
  });
}

WorkPtr LowcommBackend::exactGather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  Contiguous dense("gather");
  Tensors from = dense.inputs(inputs);
  std::vector<Tensors> to;
  for (const auto& list : outputs)
    to.push_back(dense.outputs(list));
  return viaInner({c10d::OpType::GATHER, "gather", from, outputs.empty() ? Tensors{} : outputs[0],
                   describeForInner("gather", inputs, {{"root", std::to_string(opts.rootRank)}}), dense.finish()},
                  [to, from, opts](c10d::Backend& inner) mutable { return inner.gather(to, from, opts); });
}

WorkPtr LowcommBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  return inBlock(c10d::OpType::SCATTER, [&] {
    Contiguous dense("scatter");
    Tensors to = dense.outputs(outputs);
    std::vector<Tensors> from;
    for (const auto& list : inputs)
      from.push_back(dense.inputs(list));
    return viaInner({c10d::OpType::SCATTER, "scatter", to, outputs, {}, dense.finish()},
                    [to, from, opts](c10d::Backend& inner) mutable { return inner.scatter(to, from, opts); });
  });
}

WorkPtr LowcommBackend::exactAllToAllBase(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                          std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) {
  checkOutputs("all_to_all", {output});
  return viaInner(
      {c10d::OpType::ALLTOALL_BASE, "all_to_all", {input}, {output}, describeForInner("all_to_all", {input}, {})},
      [to = bare(output), from = bare(input), output_sizes, input_sizes, opts](c10d::Backend& inner) mutable {
        return inner.alltoall_base(to, from, output_sizes, input_sizes, opts);
      });
}

WorkPtr LowcommBackend::exactAllToAll(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  checkOutputs("all_to_all", outputs);
  return viaInner({c10d::OpType::ALLTOALL, "all_to_all", inputs, outputs, describeForInner("all_to_all", inputs, {})},
                  [to = bare(outputs), from = bare(inputs), opts](c10d::Backend& inner) mutable {
                    return inner.alltoall(to, from, opts);
                  });
}

WorkPtr LowcommBackend::barrier(const c10d::BarrierOptions& opts) {
  return inBlock(c10d::OpType::BARRIER, [&] {
    return viaInner({c10d::OpType::BARRIER, "barrier", {}, {}},
                    [opts](c10d::Backend& inner) { return inner.barrier(opts); });
  });
}

void LowcommBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  startPutOff();
  waitForPendingWorks();
  expectLiving("monitored_barrier");
  const InnerOpAccount about = accountOf("monitored_barrier", takeNumbers(1), "");
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
