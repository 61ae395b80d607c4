// all_to_all, encoded or exact. Every part is encoded by itself, or not, by a rule that both of its ends can apply:
// equal splits or not, neither needs to know another pair's sizes.
#include <ATen/ATen.h>

#include "backend/collectives.h"
#include "collective/collectives.h"
#include "tensor/errors.h"
#include "tensor/op_buffers.h"
#include "tensor/wire_type.h"

namespace lowcomm {
namespace {

constexpr const char* kOp = "all_to_all";

// Parts of `tensor` along its first dimension: equal ones without sizes.
Tensors partsOf(const at::Tensor& tensor, const std::vector<int64_t>& sizes, int ranks, const char* name) {
  if (sizes.empty()) {
    TORCH_CHECK_VALUE(tensor.dim() > 0 && tensor.size(0) % ranks == 0, "lowcomm: all_to_all: ", name,
                      ": expected a first dimension that is a multiple of ", ranks, " ranks, got shape ",
                      tensor.sizes());
    return tensor.chunk(ranks, 0);
  }
  TORCH_CHECK_VALUE(sizes.size() == static_cast<size_t>(ranks), "lowcomm: all_to_all: ", name, ": expected ", ranks,
                    " split sizes, got ", sizes.size());
  int64_t sum = 0;
  for (int64_t size : sizes)
    sum += size;
  TORCH_CHECK_VALUE(tensor.dim() > 0 && sum == tensor.size(0), "lowcomm: all_to_all: ", name,
                    ": expected split sizes that sum to the first dimension of ", tensor.sizes(), ", got ", sum);
  return tensor.split_with_sizes(sizes, 0);
}

// Whether all parts go by lowcomm's own exchange.
bool takes(GroupParts& parts, const Tensors& inputs, const Tensors& outputs) {
  if (inputs.empty()) return false;
  bool own = true;
  for (const Tensors* list : {&inputs, &outputs}) {
    for (const auto& tensor : *list) {
      const at::ScalarType type = inputs[0].scalar_type();
      TORCH_CHECK_TYPE(tensor.scalar_type() == type, "lowcomm: all_to_all: expected tensors of one dtype, ", type,
                       ", got ", tensor.scalar_type());
      TORCH_CHECK_VALUE(tensor.device() == inputs[0].device(), "lowcomm: all_to_all: expected tensors of one device, ",
                        inputs[0].device(), ", got ", tensor.device());
      own = own && parts.issuer.takes(kOp, tensor);
    }
  }
  if (own) return true;
  if (parts.codecs.names(kOp)) parts.group.noteExact(kOp, "layout");
  return false;
}

WorkPtr exchangeParts(GroupParts& parts, c10d::OpType op, Tensors outputs, Tensors inputs, Tensors kept_outputs,
                      Tensors kept_inputs) {
  TORCH_CHECK_VALUE(inputs[parts.group.rank].numel() == outputs[parts.group.rank].numel(),
                    "lowcomm: all_to_all: of what rank ", parts.group.rank,
                    " keeps: expected as many elements out as in, ", inputs[parts.group.rank].numel(), ", got ",
                    outputs[parts.group.rank].numel());
  parts.group.expectLiving(kOp);
  checkOutputs(kOp, outputs);
  auto buffers = std::make_shared<OpBuffers>();
  DeviceQueue* queue = parts.issuer.queueOf(kOp, inputs[0]);
  AllToAllMessage message;
  message.dtype = WireElements(inputs[0]).dtype;
  message.type_name = WireElements(inputs[0]).type_name;
  bool exact = true, coded = false;  // what is sent, and anything
  StagingRequest staged{inputs, {}};
  const std::string because = CodecChooser::reasonAgainst(inputs[0].scalar_type()).text;
  if (!because.empty() && parts.codecs.names(kOp)) parts.group.noteExact(kOp, because);  // once, not for each part
  const auto layoutOf = [&](const at::Tensor& part, bool sent) {
    // As if every part had this one's size: what equal splits are measured by.
    const uint64_t contribution = part.nbytes() * static_cast<uint64_t>(parts.group.size);
    CodecSpec codec;
    if (part.numel() > 0 && because.empty()) codec = parts.codecs.codecOf(kOp, part, contribution);
    const bool codes = codec.id != CodecId::none;
    exact = exact && !(sent && codes);
    coded = coded || codes;
    staged.codecs.push_back(codec);
    return Layout::single(WireElements(part).count, codec);
  };
  for (int rank = 0; rank < parts.group.size; ++rank) {
    message.sent.push_back(layoutOf(inputs[rank], true));
    message.got.push_back(layoutOf(outputs[rank], false));
  }
  staged.tensors.insert(staged.tensors.end(), outputs.begin(), outputs.end());
  buffers->enter(queue, coded ? parts.issuer.deviceCodecFor(kOp, queue, staged) : nullptr);
  message.device_codec = buffers->device_codec.get();
  for (int rank = 0; rank < parts.group.size; ++rank) {
    message.inputs.push_back(buffers->source(inputs[rank], queue));
    message.outputs.push_back(buffers->target(outputs[rank]));
  }
  const uint64_t sequence = ++parts.group.sequence;
  message.draws = parts.draws.ofStep(static_cast<uint32_t>(sequence));
  buffers->run = [message = std::move(message)](OpContext& context) { allToAll(context, message); };
  return parts.issuer.submit({op, kOp, sequence, exact}, std::move(kept_inputs), std::move(kept_outputs), queue,
                             std::move(buffers));
}

}  // namespace

WorkPtr issueAllToAllBase(GroupParts& parts, at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                          std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) {
  if (!takes(parts, {input}, {output})) {
    checkOutputs(kOp, {output});
    return parts.inner.issue({c10d::OpType::ALLTOALL_BASE, kOp, {input}, {output}, parts.inner.describe(kOp, {input})},
                             [output, input, output_sizes, input_sizes, opts](c10d::Backend& inner) mutable {
                               return inner.alltoall_base(output, input, output_sizes, input_sizes, opts);
                             });
  }
  return exchangeParts(parts, c10d::OpType::ALLTOALL_BASE, partsOf(output, output_sizes, parts.group.size, "output"),
                       partsOf(input, input_sizes, parts.group.size, "input"), {output}, {input});
}

WorkPtr issueAllToAll(GroupParts& parts, Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  TORCH_CHECK_VALUE(
      inputs.size() == static_cast<size_t>(parts.group.size) && outputs.size() == static_cast<size_t>(parts.group.size),
      "lowcomm: all_to_all: expected ", parts.group.size, " inputs and outputs, got ", inputs.size(), " and ",
      outputs.size());
  if (!takes(parts, inputs, outputs)) {
    checkOutputs(kOp, outputs);
    return parts.inner.issue(
        {c10d::OpType::ALLTOALL, kOp, inputs, outputs, parts.inner.describe(kOp, inputs)},
        [outputs, inputs, opts](c10d::Backend& inner) mutable { return inner.alltoall(outputs, inputs, opts); });
  }
  return exchangeParts(parts, c10d::OpType::ALLTOALL, outputs, inputs, outputs, inputs);
}

}  // namespace lowcomm
