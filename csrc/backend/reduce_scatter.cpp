// reduce_scatter in every form of c10d, on lowcomm's own exchange.
#include <ATen/ATen.h>

#include "backend/collectives.h"
#include "backend/reduction.h"
#include "collective/collectives.h"
#include "tensor/errors.h"
#include "tensor/op_buffers.h"
#include "tensor/wire_type.h"

namespace lowcomm {
namespace {

constexpr const char* kOp = "reduce_scatter";

void checkSlice(const at::Tensor& output, const at::Tensor& input, int64_t expected) {
  TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(), "lowcomm: reduce_scatter: expected an output of dtype ",
                   input.scalar_type(), " as the input, got ", output.scalar_type());
  TORCH_CHECK_VALUE(input.numel() == expected, "lowcomm: reduce_scatter: expected an input of ", expected,
                    " elements, got ", input.numel());
  TORCH_CHECK_VALUE(output.device() == input.device(), "lowcomm: reduce_scatter: expected an output on ",
                    input.device(), ", got ", output.device());
  checkOutput(kOp, output);
}

// `results`: the caller's outputs, which `outputs` are or view; nothing complex is coded.
WorkPtr scatterMany(GroupParts& parts, c10d::OpType op, Tensors outputs, std::vector<Tensors> inputs,
                    const Tensors& results, const c10d::ReduceOp& reduce, const Layout* layout, Counter counter) {
  parts.group.expectLiving(kOp);
  auto buffers = std::make_shared<OpBuffers>();
  const Reduction reduction = *ownReduction(reduce, outputs[0].scalar_type());
  const bool reducible = reduction.kind == ReduceKind::sum;
  DeviceQueue* queue = parts.issuer.queueOf(kOp, outputs[0]);
  uint64_t contribution = 0;  // all slices of all tensors
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (const auto& input : inputs[i])
      contribution += input.nbytes();
    if (layout) checkCoded(*layout, outputs[i].scalar_type());
  }
  if (!reducible && parts.codecs.names(kOp)) parts.group.noteExact(kOp, "reduce op");
  const Draws draws = parts.draws.ofStep(counter.step);
  Tensors flat;
  StagingRequest staged{outputs, {}, reduction.premultiplied ? "PREMUL_SUM" : ""};
  std::vector<std::vector<CodecSpec>> codecs;  // by tensor, then by slice
  bool exact = !(layout && layout->coded());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Tensors& slices = inputs[i].size() == 1 ? Tensors{outputs[i]} : inputs[i];
    const bool coded = !layout && reducible && !results[i].is_complex();
    codecs.push_back(coded ? parts.codecs.codecsOfParts(kOp, slices, contribution)
                           : std::vector<CodecSpec>(slices.size()));
    exact = exact && codecs[i][0].id == CodecId::none;
    staged.codecs.insert(staged.codecs.end(), codecs[i].begin(), codecs[i].end());
    staged.tensors.insert(staged.tensors.end(), inputs[i].begin(), inputs[i].end());
  }
  if (layout) staged.add(*layout);
  buffers->enter(queue, exact ? nullptr : parts.issuer.deviceCodecFor(kOp, queue, staged));
  uint64_t slot = counter.slot;
  std::vector<ScatterMessage> messages;
  for (size_t i = 0; i < outputs.size(); ++i) {
    ScatterMessage message;
    message.dtype = wireType(outputs[i].scalar_type());
    const bool one = inputs[i].size() == 1;  // one tensor for all ranks, or one a rank
    for (size_t r = 0; r < inputs[i].size(); ++r) {
      const at::Tensor& input = inputs[i][r];
      const uint64_t count = one ? outputs[i].numel() : input.numel();
      message.layouts.push_back(layout ? *layout : Layout::single(count, codecs[i][r]));
      const auto* base = static_cast<const std::byte*>(buffers->source(input, queue));
      const size_t ranks = one ? static_cast<size_t>(parts.group.size) : 1;
      for (size_t slice = 0; slice < ranks; ++slice)
        message.inputs.push_back(base + slice * outputs[i].nbytes());
      flat.push_back(input);
    }
    message.output = buffers->target(outputs[i]);
    message.draws = draws.slot(slot);
    slot += static_cast<uint64_t>(parts.group.size);
    messages.push_back(std::move(message));
  }
  const uint64_t sequence = ++parts.group.sequence;  // last, as in an all_gather
  for (ScatterMessage& message : messages)
    message.draws.step = layout ? counter.step : static_cast<uint32_t>(sequence);
  buffers->run = [messages = std::move(messages), reduction, device_codec = buffers->device_codec.get()](
                     OpContext& context) { reduceScatter(context, messages, reduction, device_codec); };
  return parts.issuer.submit({op, kOp, sequence, exact}, flat, results, queue, std::move(buffers));
}

// Whether lowcomm reduces it itself; where it does not and a policy named the op, that is said.
bool takes(GroupParts& parts, const at::Tensor& output, const c10d::ReduceOp& op) {
  if (parts.issuer.takes(kOp, output) && ownReduction(op, asReal({output}, op)[0].scalar_type())) return true;
  if (parts.codecs.names(kOp))
    parts.group.noteExact(kOp, std::string("reduce op or dtype ") + c10::toString(output.scalar_type()));
  return false;
}

}  // namespace

WorkPtr issueReduceScatter(GroupParts& parts, Tensors& outputs, std::vector<Tensors>& inputs,
                           const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == 1 && inputs.size() == 1,
                    "lowcomm: reduce_scatter: expected one output and one input list, got ", outputs.size(), " and ",
                    inputs.size());
  TORCH_CHECK_VALUE(inputs[0].size() == static_cast<size_t>(parts.group.size), "lowcomm: reduce_scatter: expected ",
                    parts.group.size, " inputs, got ", inputs[0].size());
  if (!takes(parts, outputs[0], opts.reduceOp)) {
    return parts.inner.issue(
        {c10d::OpType::REDUCE_SCATTER, kOp, inputs[0], outputs,
         parts.inner.describe(kOp, inputs[0], {{"reduce op", reduceOpName(opts.reduceOp)}})},
        [outputs, inputs, opts](c10d::Backend& inner) mutable { return inner.reduce_scatter(outputs, inputs, opts); });
  }
  checkSlice(outputs[0], inputs[0][parts.group.rank], outputs[0].numel());
  for (auto& input : inputs[0])
    checkSlice(outputs[0], input, input.numel());  // a rank's slice may be longer or shorter than this one's
  return scatterMany(parts, c10d::OpType::REDUCE_SCATTER, asReal(outputs, opts.reduceOp),
                     {asReal(inputs[0], opts.reduceOp)}, outputs, opts.reduceOp, nullptr, {});
}

WorkPtr issueReduceScatterBase(GroupParts& parts, at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) {
  if (!takes(parts, output, opts.reduceOp)) {
    return parts.inner.issue({c10d::OpType::_REDUCE_SCATTER_BASE,
                              kOp,
                              {input},
                              {output},
                              parts.inner.describe(kOp, {input}, {{"reduce op", reduceOpName(opts.reduceOp)}})},
                             [output, input, opts](c10d::Backend& inner) mutable {
                               return inner._reduce_scatter_base(output, input, opts);
                             });
  }
  checkSlice(output, input, output.numel() * parts.group.size);
  return scatterMany(parts, c10d::OpType::_REDUCE_SCATTER_BASE, asReal({output}, opts.reduceOp),
                     {asReal({input}, opts.reduceOp)}, {output}, opts.reduceOp, nullptr, {});
}

WorkPtr issueReduceScatterCoalesced(GroupParts& parts, Tensors& outputs, Tensors& inputs,
                                    const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size() && !outputs.empty(),
                    "lowcomm: reduce_scatter: expected as many inputs as outputs, got ", inputs.size(), " and ",
                    outputs.size());
  bool own = true;
  for (auto& output : outputs)
    own = own && takes(parts, output, opts.reduceOp);
  if (!own) {
    return parts.inner.issue({c10d::OpType::COALESCED, kOp, inputs, outputs,
                              parts.inner.describe(kOp, inputs, {{"reduce op", reduceOpName(opts.reduceOp)}})},
                             [outputs, inputs, opts](c10d::Backend& inner) mutable {
                               return inner.reduce_scatter_tensor_coalesced(outputs, inputs, opts);
                             });
  }
  std::vector<Tensors> slices;
  for (size_t i = 0; i < outputs.size(); ++i) {
    checkSlice(outputs[i], inputs[i], outputs[i].numel() * parts.group.size);
    slices.push_back(asReal({inputs[i]}, opts.reduceOp));
  }
  return scatterMany(parts, c10d::OpType::COALESCED, asReal(outputs, opts.reduceOp), std::move(slices), outputs,
                     opts.reduceOp, nullptr, {});
}

WorkPtr issueReduceScatterLayout(GroupParts& parts, const at::Tensor& output, const at::Tensor& input,
                                 const Layout& layout, const c10d::ReduceOp& op, Counter counter) {
  checkSlice(output, input, output.numel() * parts.group.size);
  TORCH_CHECK_VALUE(static_cast<uint64_t>(output.numel()) == layout.elements(),
                    "lowcomm: reduce_scatter by layout: expected an output of ", layout.elements(), " elements, got ",
                    output.numel());
  const auto reduction = ownReduction(op, output.scalar_type());
  TORCH_CHECK_VALUE(
      reduction && reduction->kind == ReduceKind::sum,
      "lowcomm: reduce_scatter by layout: expected SUM, AVG or PREMUL_SUM of a floating dtype, got another op or ",
      output.scalar_type());
  return scatterMany(parts, c10d::OpType::_REDUCE_SCATTER_BASE, {output}, {{input}}, {output}, op, &layout, counter);
}

}  // namespace lowcomm
