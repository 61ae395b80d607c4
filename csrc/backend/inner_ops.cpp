#include "backend/inner_ops.h"

#include <algorithm>
#include <chrono>

#include "collective/exchange.h"
#include "collective/message_summary.h"
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

MessageSummary describedTensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return {"undefined", "0"};
  const DType dtype = wireType(tensor.scalar_type());
  std::string type = dtype == DType::opaque ? c10::toString(tensor.scalar_type()) : dtypeName(dtype);
  if (tensor.layout() != at::kStrided) type += std::string(" ") + c10::str(tensor.layout());
  return {type, std::to_string(tensor.numel())};
}

}  // namespace

InnerOps::InnerOps(Group& group, InnerBackend& backend, const CodecChooser& codecs, Coalescing& blocks,
                   OpIssuer& issuer)
    : group_(group), backend_(backend), codecs_(codecs), blocks_(blocks), issuer_(issuer) {}

WorkPtr InnerOps::issue(Op op, Call call) {
  group_.expectLiving(op.name);
  op.inner = op.tensors.empty() ? nullptr : backend_.of(op.tensors[0]);
  if (!op.inner) refuse(op);
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
      ": expected what lowcomm carries (dense tensors of one device, one a call or a list where the op has one, of a "
      "dtype that its reduce op takes), got ",
      op.tensors.size(), op.tensors.size() == 1 ? " tensor" : " tensors", what, op.detail);
}

WorkPtr InnerOps::serve(const Op& op, const Call& call) {
  group_.expectLiving(op.name);
  if (op.description) {
    Exchange exchange;
    exchange.description = *op.description;
    issuer_.runAndWait(op.name, op.sequence, [exchange](OpContext& context) { runExchange(context, exchange); });
  }
  InnerOpAccount about = accountOf(op);
  NoPythonObjects guard;
  std::exception_ptr error;
  try {
    WorkPtr served = call(*op.inner);
    if (op.collective) group_.sequence = std::max(group_.sequence.load(), op.sequence);
    group_.stats.inner(op.name, op.type == c10d::OpType::RECV || op.type == c10d::OpType::RECVANYSOURCE ? 0 : op.bytes);
    return c10::make_intrusive<InnerWork>(std::move(served), op.type, group_.rank, op.sequence, about, op.outputs);
  } catch (...) {
    error = about.failed(std::current_exception());
  }
  std::rethrow_exception(error);
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

InnerOpAccount InnerOps::accountOf(const Op& op) const {
  const std::string detail = op.inner->getBackendName() + op.detail + ", bytes handed over " + std::to_string(op.bytes);
  std::shared_ptr<OpProgress> progress =
      group_.sharedEngine()->record().add(op.name, static_cast<uint32_t>(op.sequence));
  if (progress) {
    progress->update([&](OpProgress::State& state) {
      state.description.emplace_back("inner backend", detail);
      state.start();
    });
  }
  return {std::string("lowcomm: ") + op.name + " failed on rank " + std::to_string(group_.rank) + " of " +
              std::to_string(group_.size) + " [op " + op.name + ", sequence " + std::to_string(op.sequence) +
              ", group " + group_.name() + ", inner backend " + detail,
          std::chrono::steady_clock::now(), group_.sharedEngine(), std::move(progress),
          static_cast<uint32_t>(op.sequence)};
}

void InnerOps::waitForAll() {
  if (Engine* engine = group_.running()) blocking([&] { engine->drain(); });
  if (BackendPtr device = backend_.ifMade()) device->waitForPendingWorks();
}

}  // namespace lowcomm
