#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "backend/collectives.h"
#include "backend/reduction.h"
#include "collective/all_reduce.h"
#include "tensor/errors.h"
#include "tensor/op_buffers.h"
#include "tensor/wire_type.h"

// all_reduce by policy, by a codec that the caller names, or exact; what lowcomm does not carry is the inner backend's.

namespace lowcomm {

namespace {

constexpr const char* kOp = "all_reduce";

// Reduces `terms` to `sum`, element by element, in their order. Both are host tensors of one type, `sum` contiguous.
void combine(const at::Tensor& sum, const Tensors& terms, ReduceKind kind) {
  at::NoGradGuard no_grad;
  const DType dtype = wireType(sum.scalar_type());
  const auto n = static_cast<uint64_t>(sum.numel());
  std::vector<std::byte> total(n * itemBytes(accumulatorType(dtype)));
  for (size_t i = 0; i < terms.size(); ++i) {
    const at::Tensor term = terms[i].contiguous();
    if (i == 0)
      reduceAssign(total.data(), term.const_data_ptr(), dtype, n);
    else
      reduceInto(total.data(), term.const_data_ptr(), dtype, kind, n);
  }
  reduceFinish(sum.mutable_data_ptr(), total.data(), dtype, n, /*average_over=*/0);
}

// `results`: the caller's tensors, which `tensors` are or view; or, with `as_one`, host tensors whose reduction is the
// rank's contribution, for which `tensors` has room, and which all get the result.
WorkPtr reduceMany(GroupParts& parts, c10d::OpType op, Tensors tensors, const Tensors& results,
                   const std::vector<CodecSpec>& codecs, const Reduction& reduction, std::shared_ptr<Residual> residual,
                   bool as_one = false) {
  parts.group.expectLiving(kOp);
  for (const auto& tensor : results)
    checkOutput(kOp, tensor);
  auto buffers = std::make_shared<OpBuffers>();
  DeviceQueue* queue = parts.issuer.queueOf(kOp, tensors[0]);
  Draws draws = parts.draws.ofStep(0);
  const auto travelsExact = [](const CodecSpec& codec) { return codec.id == CodecId::none; };
  const bool exact = std::all_of(codecs.begin(), codecs.end(), travelsExact);
  std::string because = residual ? "a residual" : reduction.premultiplied ? "PREMUL_SUM" : "";
  if (std::any_of(codecs.begin(), codecs.end(), travelsExact)) because = "coalesced with a tensor that travels exact";
  const StagingRequest staged{tensors, codecs, std::move(because)};
  buffers->enter(queue, exact ? nullptr : parts.issuer.deviceCodecFor(kOp, queue, staged));
  std::vector<void*> data;
  for (const auto& tensor : tensors)
    data.push_back(buffers->sourceAndTarget(tensor, queue));
  // Lent once nothing can fail before the op is queued.
  float* state = residual ? residual->begin(tensors[0].numel()) : nullptr;
  const uint64_t sequence = ++parts.group.sequence;
  draws.step = static_cast<uint32_t>(sequence);
  uint64_t slot = 0;
  std::vector<AllReduceMessage> messages;
  for (size_t i = 0; i < tensors.size(); ++i) {
    messages.push_back({static_cast<uint64_t>(tensors[i].numel()), codecs[i], wireType(tensors[i].scalar_type()),
                        data[i], draws.slot(slot), state});
    slot += static_cast<uint64_t>(parts.group.size);
  }
  buffers->run = [messages = std::move(messages), reduction, device_codec = buffers->device_codec.get()](
                     OpContext& context) { allReduce(context, messages, reduction, device_codec); };
  if (as_one) {
    buffers->run = [reduce = std::move(buffers->run), sum = tensors[0], results,
                    kind = reduction.kind](OpContext& context) {
      combine(sum, results, kind);
      reduce(context);
    };
    for (const at::Tensor& result : results)
      buffers->copies_out.emplace_back(result, tensors[0]);
  }
  if (residual) {
    buffers->ended = [residual](std::exception_ptr error) { error ? residual->rollBack() : residual->commit(); };
  }
  return parts.issuer.submit({op, kOp, sequence, exact}, tensors, results, queue, std::move(buffers));
}

// The fields that ranks compare before the inner backend serves an op under a policy.
std::optional<KeyValues> described(GroupParts& parts, const Tensors& tensors, const c10d::ReduceOp& op) {
  return parts.inner.describe(kOp, tensors, {{"reduce op", reduceOpName(op)}});
}

// An op on lowcomm's own lane, encoded or exact; null where only the inner backend can serve it.
WorkPtr reduceOnOwnLane(GroupParts& parts, c10d::OpType op, const Tensors& given, const c10d::ReduceOp& reduce) {
  const bool named = parts.codecs.names(kOp);
  const Tensors tensors = asReal(given, reduce);
  std::optional<Reduction> reduction;
  const bool own = std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    reduction = ownReduction(reduce, tensor.scalar_type());
    return parts.issuer.takes(kOp, tensor) && reduction;
  });
  if (!own || !reduction) {
    const std::string type = tensors.empty() ? "none" : c10::toString(tensors[0].scalar_type());
    if (named) parts.group.noteExact(kOp, "layout, reduce op or dtype " + type);
    return nullptr;
  }
  // For several tensors in one call c10d's allreduce asks for the sum over all of them, not for one sum each.
  if (op == c10d::OpType::ALLREDUCE && tensors.size() > 1) {
    for (const auto& tensor : tensors) {
      TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.sizes() == tensors[0].sizes() && tensor.dtype() == tensors[0].dtype(),
                        "lowcomm: all_reduce of several tensors: expected host tensors as the first, ",
                        tensors[0].scalar_type(), tensors[0].sizes(), ", got ", tensor.scalar_type(), tensor.sizes(),
                        " on ", tensor.device());
    }
    if (named) parts.group.noteExact(kOp, "several tensors in one call");
    const at::Tensor sum = at::empty(tensors[0].sizes(), tensors[0].options());
    return reduceMany(parts, op, {sum}, tensors, {CodecSpec()}, *reduction, nullptr, /*as_one=*/true);
  }
  if (reduction->kind != ReduceKind::sum) {
    if (named) parts.group.noteExact(kOp, std::string("reduce op ") + reduction->name());
    return reduceMany(parts, op, tensors, given, std::vector<CodecSpec>(tensors.size()), *reduction, nullptr);
  }
  return reduceMany(parts, op, tensors, given, parts.codecs.codecsOf(kOp, given), *reduction, nullptr);
}

}  // namespace

WorkPtr issueAllReduce(GroupParts& parts, Tensors& tensors, const c10d::AllreduceOptions& opts) {
  parts.group.expectLiving(kOp);
  if (tensors.size() == 1 && tensors[0].layout() == at::kSparse) return issueAllReduceSparse(parts, tensors, opts);
  if (WorkPtr own = reduceOnOwnLane(parts, c10d::OpType::ALLREDUCE, tensors, opts.reduceOp)) return own;
  return parts.inner.issue({c10d::OpType::ALLREDUCE, kOp, tensors, tensors, described(parts, tensors, opts.reduceOp)},
                           [tensors, opts](c10d::Backend& inner) mutable { return inner.allreduce(tensors, opts); });
}

WorkPtr issueAllReduceCoalesced(GroupParts& parts, Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  parts.group.expectLiving(kOp);
  if (WorkPtr own = reduceOnOwnLane(parts, c10d::OpType::ALLREDUCE_COALESCED, tensors, opts.reduceOp)) return own;
  return parts.inner.issue(
      {c10d::OpType::ALLREDUCE_COALESCED, kOp, tensors, tensors, described(parts, tensors, opts.reduceOp)},
      [tensors, opts](c10d::Backend& inner) mutable { return inner.allreduce_coalesced(tensors, opts); });
}

WorkPtr issueCodedAllReduce(GroupParts& parts, const at::Tensor& tensor, const c10d::ReduceOp& op,
                            const CodecSpec& codec, std::shared_ptr<Residual> residual) {
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kHalf || type == at::kBFloat16,
                   "lowcomm: all_reduce: expected float32, float16 or bfloat16, got ", type);
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "lowcomm: all_reduce: expected a dense tensor, got layout ",
                    tensor.layout());
  const auto reduction = ownReduction(op, type);
  TORCH_CHECK_VALUE(reduction && reduction->kind == ReduceKind::sum && !(residual && reduction->premultiplied),
                    "lowcomm: all_reduce: expected SUM or AVG", residual ? "" : " or PREMUL_SUM", ", got another op");
  TORCH_CHECK_VALUE(codec.id != CodecId::none, "lowcomm: all_reduce: expected a codec that rounds, got none");
  const std::string misfit = untaken(codec, {tensor.sizes().data(), tensor.sizes().size()}).value_or("");
  TORCH_CHECK_VALUE(misfit.empty(), "lowcomm: all_reduce: expected a tensor that ", codec.str(), " takes, got ",
                    misfit);
  TORCH_CHECK_VALUE(!needsTable(codec), "lowcomm: all_reduce: expected a codec that needs no level table, got ",
                    codec.str());
  const CodecSpec closed = tensor.dim() == 0 ? codec : codec.withChannels(static_cast<uint64_t>(tensor.size(-1)));
  return reduceMany(parts, c10d::OpType::ALLREDUCE, {tensor}, {tensor}, {closed}, *reduction, std::move(residual));
}

// all_reduce of several tensors by codes and low-rank factors, with a state each that the caller owns.

namespace {

using States = std::vector<std::shared_ptr<Compression>>;

// Caller's mistakes: nothing has been sent, and no state lent.
Reduction checked(const Tensors& tensors, const States& states, const std::vector<CodecSpec>& codecs,
                  const c10d::ReduceOp& op) {
  TORCH_CHECK_VALUE(!tensors.empty() && tensors.size() == states.size(),
                    "lowcomm: compressed all_reduce: expected a state a tensor, got ", states.size(), " for ",
                    tensors.size());
  const at::ScalarType type = tensors[0].scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kHalf || type == at::kBFloat16,
                   "lowcomm: compressed all_reduce: expected float32, float16 or bfloat16, got ", type);
  for (const auto& tensor : tensors) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == type, "lowcomm: compressed all_reduce: expected ", type,
                     " as the first tensor, got ", tensor.scalar_type());
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.is_contiguous() && tensor.numel() > 0,
                      "lowcomm: compressed all_reduce: expected dense contiguous tensors with elements, got shape ",
                      tensor.sizes(), ", strides ", tensor.strides());
    TORCH_CHECK_VALUE(tensor.device() == tensors[0].device(), "lowcomm: compressed all_reduce: expected tensors on ",
                      tensors[0].device(), ", got one on ", tensor.device());
  }
  const auto reduction = ownReduction(op, type);
  TORCH_CHECK_VALUE(reduction && reduction->kind == ReduceKind::sum && !reduction->premultiplied,
                    "lowcomm: compressed all_reduce: expected SUM or AVG, got another op");
  for (const CodecSpec& codec : codecs) {
    TORCH_CHECK_VALUE(codec.id != CodecId::none && codec.axis != Axis::channel && !needsTable(codec) &&
                          codec.nonfinite == Nonfinite::poison,
                      "lowcomm: compressed all_reduce: expected a codec of flat tensors that rounds, needs no level "
                      "table and has nonfinite=poison, got ",
                      codec.str());
  }
  return *reduction;
}

}  // namespace

WorkPtr issueLowRankAllReduce(GroupParts& parts, const Tensors& tensors, const c10d::ReduceOp& op,
                              const CodecSpec& codec, const CodecSpec& projection, const States& states,
                              const std::vector<uint64_t>& slots, const std::vector<uint32_t>& owners, uint32_t step) {
  const Reduction reduction = checked(tensors, states, {codec, projection}, op);
  TORCH_CHECK_VALUE(slots.size() == tensors.size() && owners.size() == tensors.size(),
                    "lowcomm: compressed all_reduce: expected a slot and an owner a tensor, got ", slots.size(),
                    " and ", owners.size(), " for ", tensors.size());
  parts.group.expectLiving(kOp);
  auto buffers = std::make_shared<OpBuffers>();
  DeviceQueue* queue = parts.issuer.queueOf(kOp, tensors[0]);
  buffers->enter(queue, parts.issuer.deviceCodecFor(kOp, queue, {tensors, {codec}, "compressed by lc.ddp"}));
  LowRankMessage message{wireType(tensors[0].scalar_type()), codec, projection, parts.draws.ofStep(step), {}};
  const std::vector<void*> elements = buffers->sourcesAndTargets(tensors, queue);
  for (size_t i = 0; i < tensors.size(); ++i)
    message.tensors.push_back({elements[i], static_cast<uint64_t>(tensors[i].numel())});
  // Lent once nothing but a state's own mistake can fail before the op is queued.
  bool low_rank = false;
  for (size_t i = 0; i < states.size(); ++i) {
    try {
      const Compression::StateView lent = states[i]->begin(tensors[i].numel());
      LowRankTensor& tensor = message.tensors[i];
      tensor.residual = lent.residual;
      tensor.kept = lent.kept;
      tensor.elsewhere.coded = lent.coded;
      tensor.factor = lent.factor;
    } catch (...) {
      for (size_t before = 0; before < i; ++before)
        states[before]->end(false);
      throw;
    }
    LowRankTensor& tensor = message.tensors[i];
    tensor.rank = static_cast<uint64_t>(states[i]->rank());
    if (tensor.rank > 0) {
      tensor.rows = static_cast<uint64_t>(states[i]->rows());
      tensor.columns = static_cast<uint64_t>(states[i]->columns());
      low_rank = true;
    }
    tensor.seed = states[i]->seed() + step;
    tensor.slot = slots[i];
    tensor.first_owner = owners[i];
  }
  const uint64_t sequence = ++parts.group.sequence;
  if (low_rank) ++parts.group.sequence;  // the second exchange's
  auto finite = std::make_shared<std::atomic<bool>>(false);
  buffers->run = [message = std::move(message), reduction, finite](OpContext& context) {
    *finite = lowRankAllReduce(context, message, reduction);
  };
  buffers->ended = [states, finite](std::exception_ptr error) {
    for (const auto& state : states)
      state->end(!error && *finite);
  };
  return parts.issuer.submit({c10d::OpType::ALLREDUCE, kOp, sequence, /*exact=*/false}, tensors, tensors, queue,
                             std::move(buffers));
}

}  // namespace lowcomm
