#include "backend/inner_ops.h"

#include <ATen/ThreadLocalState.h>

#include <algorithm>
#include <chrono>

#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "tensor/errors.h"
#include "tensor/python_state.h"
#include "tensor/wire_type.h"

namespace lowcomm {
namespace {

uint64_t bytesOf(const Tensors& tensors) {
  uint64_t bytes = 0;
  for (const auto& tensor : tensors) {
    if (tensor.defined() && tensor.layout() == at::kStrided) bytes += tensor.nbytes();
  }
  return bytes;
}

Exchange exchangeOf(const KeyValues& description) {
  Exchange exchange;
  exchange.description = description;
  return exchange;
}

MessageSummary describedTensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return {"undefined", "0"};
  const DType dtype = wireType(tensor.scalar_type());
  std::string type = dtype == DType::opaque ? c10::toString(tensor.scalar_type()) : dtypeName(dtype);
  if (tensor.layout() != at::kStrided) type += std::string(" ") + c10::str(tensor.layout());
  return {type, std::to_string(tensor.numel())};
}

}  // namespace

InnerOps::InnerOps(Group& group, InnerBackends& backends, const CodecChooser& codecs, Coalescing& blocks,
                   OpIssuer& issuer)
    : group_(group), backends_(backends), codecs_(codecs), blocks_(blocks), issuer_(issuer) {}

WorkPtr InnerOps::issue(Op op, Call call) {
  group_.expectLiving(op.name);
  op.inner = op.tensors.empty() ? backends_.host() : backends_.of(op.tensors[0]);
  if (!op.inner) refuse(op);
  if (!op.tensors.empty() && op.tensors[0].defined() && op.inner == backends_.host())
    expectNoCapture(group_, op.name, op.tensors[0]);
  op.bytes = bytesOf(op.tensors);
  op.sequence = group_.sequence + (op.collective ? 1 : 0);
  const bool put_off = op.collective && blocks_.open();
  // Without a description it is counted once the inner backend has taken the op: a call that it refuses on one rank
  // must not part that rank's numbers from the others'. A block takes back what it did not start.
  if (op.description || put_off) group_.sequence = op.sequence;
  if (!put_off) return serve(op, call);
  return blocks_.putOff(op.type, op.sequence, [this, living = group_.living(op.name), op, call = std::move(call)] {
    const BackendPtr held = living();
    return serve(op, call);
  });
}

void InnerOps::refuse(const Op& op) const {
  std::string what;
  for (size_t i = 0; i < op.tensors.size() && i < 3; ++i) {
    const MessageSummary summary = describedTensor(op.tensors[i]);
    what += ", " + summary.dtype + " of " + summary.elements + " elements";
  }
  if (op.tensors.size() > 3) what += ", ...";
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "lowcomm: ", op.name, " on group ", group_.name(),
      ": expected what transport=\"tcp\" carries (one dense tensor a call, or a list where the op has one, of a dtype "
      "that its reduce op takes), got ",
      op.tensors.size(), op.tensors.size() == 1 ? " tensor" : " tensors", what, op.detail,
      "; transport=\"gloo\" hands it to gloo");
}

WorkPtr InnerOps::serve(const Op& op, const Call& call) {
  group_.expectLiving(op.name);
  if (op.type == c10d::OpType::BARRIER) waitForAll();
  // Gloo numbers collectives by order of issue: one that is issued behind a queued one is queued too.
  if (op.collective && op.inner == backends_.host() && (op.description || queued_ > 0)) {
    if (op.tensors.empty() || !op.tensors[0].defined() || op.tensors[0].device().is_cpu())
      return serveOnWorker(op, call);
    // A device's tensors are read in the order of the caller's stream.
    waitForAll();
  }
  if (op.description) {
    issuer_.runAndWait(op.name, op.sequence, [exchange = exchangeOf(*op.description)](OpContext& context) {
      runExchange(context, exchange);
    });
  }
  InnerOpAccount about = accountOf(op.name, op.sequence, op.detail + ", bytes handed over " + std::to_string(op.bytes));
  NoPythonObjects guard;
  std::exception_ptr error;
  try {
    WorkPtr served = call(*op.inner);
    if (op.collective) group_.sequence = std::max(group_.sequence.load(), op.sequence);
    group_.stats.inner(op.name, op.type == c10d::OpType::RECV || op.type == c10d::OpType::RECVANYSOURCE ? 0 : op.bytes);
    return c10::make_intrusive<InnerWork>(std::move(served), op.type, group_.rank, op.sequence, about, op.outputs,
                                          group_.callbacks, op.finish, /*on_host=*/op.inner == backends_.host());
  } catch (...) {
    error = about.failed(std::current_exception());
  }
  std::rethrow_exception(error);
}

// On the worker, so that a caller who does not wait for the op does not wait for its description either.
WorkPtr InnerOps::serveOnWorker(const Op& op, const Call& call) {
  auto work =
      c10::make_intrusive<EngineWork>(group_.rank, op.type, profilerTitle(group_.options->name, op.name),
                                      EngineWork::Name{op.name, group_.name(), op.sequence, group_.sharedEngine()},
                                      op.tensors, op.outputs, group_.callbacks);
  group_.sequence = std::max(group_.sequence.load(), op.sequence);
  NoPythonObjects guard;
  struct QueueEntry {
    Op op;
    Call call;
    at::ThreadLocalState state = {};
  };
  const auto queued = std::make_shared<std::optional<QueueEntry>>(QueueEntry{op, call});
  ++queued_;
  group_.engine().submit(
      op.name,
      [this, queued](OpContext& context) {
        at::ThreadLocalStateGuard restored((*queued)->state);
        runOnWorker((*queued)->op, (*queued)->call, context);
      },
      [this, queued, work](std::exception_ptr error, const OpCounters&) {
        --queued_;
        queued->reset();  // its tensors go before anybody is told
        work->complete(asTorchError(error));
      },
      static_cast<uint32_t>(op.sequence));
  return work;
}

void InnerOps::runOnWorker(const Op& op, const Call& call, OpContext& context) {
  constexpr std::chrono::milliseconds kGlance{200};  // how often the end of the group is looked for
  if (op.description) runExchange(context, exchangeOf(*op.description));
  context.whole = true;  // what the inner backend meets ends the group by InnerOpAccount::failed()
  InnerOpAccount about =
      accountOf(op.name, op.sequence, op.detail + ", bytes handed over " + std::to_string(op.bytes), context.progress);
  std::exception_ptr error;
  try {
    WorkPtr served = call(*op.inner);
    group_.stats.inner(op.name, op.bytes);
    for (bool waiting = true; waiting;) {
      const auto begin = std::chrono::steady_clock::now();
      try {
        waiting = !served->wait(kGlance);
      } catch (...) {
        // wait() throws for a time-out and for an error. An exception before kGlance is over is an error.
        const bool timed_out = std::chrono::steady_clock::now() - begin >= kGlance;
        if (served->isCompleted()) {
          served->wait(kNoTimeout);  // its own error, if it has one
          waiting = false;
        } else if (!timed_out || !group_.sharedEngine()->endedWhy().empty()) {
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

std::optional<KeyValues> InnerOps::describe(const std::string& op, const Tensors& tensors,
                                            const std::vector<std::pair<std::string, std::string>>& more) const {
  if (!codecs_.names(op) || group_.size == 1) return std::nullopt;
  std::vector<MessageSummary> described;
  for (const auto& tensor : tensors)
    described.push_back(describedTensor(tensor));
  KeyValues description = lowcomm::describe(op, described);
  description.fields.insert(std::prev(description.fields.end()), more.begin(), more.end());
  return description;
}

InnerOpAccount InnerOps::accountOf(const std::string& name, uint64_t sequence, const std::string& detail,
                                   std::shared_ptr<OpProgress> progress) const {
  const std::string inner = backends_.host() ? backends_.host()->getBackendName() : "nccl";
  if (!progress) progress = group_.sharedEngine()->record().add(name, static_cast<uint32_t>(sequence));
  if (progress) {
    progress->update([&](OpProgress::State& state) {
      state.description.emplace_back("inner backend", inner + detail);
      state.start();
    });
  }
  return {"lowcomm: " + name + " failed on rank " + std::to_string(group_.rank) + " of " + std::to_string(group_.size) +
              " [op " + name + ", sequence " + std::to_string(sequence) + ", group " + group_.name() +
              ", inner backend " + inner + detail,
          std::chrono::steady_clock::now(), group_.sharedEngine(), std::move(progress),
          static_cast<uint32_t>(sequence)};
}

void InnerOps::waitForAll() {
  if (Engine* engine = group_.running()) blocking([&] { engine->drain(); });
  if (BackendPtr device = backends_.deviceIfMade()) device->waitForPendingWorks();
}

}  // namespace lowcomm
