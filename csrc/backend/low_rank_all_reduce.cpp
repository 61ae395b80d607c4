// all_reduce of several tensors by codes and low-rank factors, with a state each that the caller owns.
#include <ATen/ATen.h>

#include <atomic>
#include <memory>

#include "backend/collectives.h"
#include "backend/own_reduction.h"
#include "collective/low_rank_all_reduce.h"
#include "tensor/op_buffers.h"
#include "tensor/wire_type.h"

namespace lowcomm {
namespace {

constexpr const char* kOp = "all_reduce";

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
  buffers->enter(
      queue, parts.issuer.deviceCodecFor(kOp, queue, {tensors, {codec}, /*keeps_own=*/true, "compressed by lc.ddp"}));
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
