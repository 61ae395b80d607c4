// broadcast and gather, encoded or exact; reduce and scatter, exact. CUDA tensors that no policy names are the inner
// backend's, where the group has one.
#include <ATen/ATen.h>

#include <algorithm>

#include "backend/collectives.h"
#include "backend/reduction.h"
#include "collective/collectives.h"
#include "collective/summer.h"
#include "tensor/errors.h"
#include "tensor/op_buffers.h"
#include "tensor/wire_type.h"

namespace lowcomm {
namespace {

int checkedRoot(const char* op, int64_t root, int size) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, "lowcomm: ", op, ": expected a root among the group's ranks 0...",
                    size - 1, ", got ", root);
  return static_cast<int>(root);
}

}  // namespace

WorkPtr issueBroadcast(GroupParts& parts, Tensors& tensors, const c10d::BroadcastOptions& opts) {
  constexpr const char* kOp = "broadcast";
  const int root = checkedRoot(kOp, opts.rootRank, parts.group.size);
  const auto taken = [&](const at::Tensor& tensor) { return parts.issuer.takes(kOp, tensor); };
  if (tensors.empty() || !std::all_of(tensors.begin(), tensors.end(), taken)) {
    if (parts.codecs.names(kOp)) parts.group.noteExact(kOp, "layout");
    return parts.inner.issue({c10d::OpType::BROADCAST, kOp, tensors, tensors,
                              parts.inner.describe(kOp, tensors, {{"root", std::to_string(root)}})},
                             [tensors, opts](c10d::Backend& inner) mutable { return inner.broadcast(tensors, opts); });
  }
  parts.group.expectLiving(kOp);
  // c10d sends the root's tensor number `rootTensor`, and every rank writes it to all tensors of the call.
  const size_t which = root == parts.group.rank ? static_cast<size_t>(opts.rootTensor) : 0;
  TORCH_CHECK_VALUE(which < tensors.size(), "lowcomm: broadcast: expected a root tensor of 0...", tensors.size() - 1,
                    ", got ", opts.rootTensor);
  const at::Tensor& sent = tensors[which];
  const std::vector<CodecSpec> codecs = parts.codecs.codecsOf(kOp, {sent});
  const bool exact = codecs[0].id == CodecId::none;
  const bool only_reads = exact && root == parts.group.rank;  // a coded root writes the values that the others decode
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.sizes() == sent.sizes() && tensor.options().type_equal(sent.options()),
                      "lowcomm: broadcast of several tensors: expected ", sent.scalar_type(), sent.sizes(), " on ",
                      sent.device(), ", got ", tensor.scalar_type(), tensor.sizes(), " on ", tensor.device());
    if (!only_reads || !tensor.is_same(sent)) checkOutput(kOp, tensor);
  }
  auto buffers = std::make_shared<OpBuffers>();
  DeviceQueue* queue = parts.issuer.queueOf(kOp, sent);
  buffers->enter(queue, exact ? nullptr : parts.issuer.deviceCodecFor(kOp, queue, {tensors, codecs}));
  const WireElements elements(sent);
  // The root's schedule writes the bytes that it read.
  void* data = only_reads ? const_cast<void*>(buffers->source(sent, queue)) : buffers->sourceAndTarget(sent, queue);
  BroadcastMessage message{elements.count, codecs[0], elements.dtype, data};
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_same(sent)) buffers->copies_out.emplace_back(tensor, sent);
  }
  message.device_codec = buffers->device_codec.get();
  message.type_name = elements.type_name;
  message.type_elements = elements.type_elements;
  const uint64_t sequence = ++parts.group.sequence;
  message.draws = parts.draws.ofStep(static_cast<uint32_t>(sequence));
  buffers->run = [message = std::move(message), root](OpContext& context) {
    lowcomm::broadcast(context, {message}, root);
  };
  return parts.issuer.submit({c10d::OpType::BROADCAST, kOp, sequence, exact}, tensors, tensors, queue,
                             std::move(buffers));
}

WorkPtr issueGather(GroupParts& parts, std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::GatherOptions& opts) {
  constexpr const char* kOp = "gather";
  const int root = checkedRoot(kOp, opts.rootRank, parts.group.size);
  if (inputs.size() != 1 || !parts.issuer.takes(kOp, inputs[0])) {
    if (parts.codecs.names(kOp)) parts.group.noteExact(kOp, "layout");
    return parts.inner.issue(
        {c10d::OpType::GATHER, kOp, inputs, outputs.empty() ? Tensors{} : outputs[0],
         parts.inner.describe(kOp, inputs, {{"root", std::to_string(root)}})},
        [outputs, inputs, opts](c10d::Backend& inner) mutable { return inner.gather(outputs, inputs, opts); });
  }
  parts.group.expectLiving(kOp);
  const Tensors none;
  const Tensors& to = outputs.empty() ? none : outputs[0];
  const size_t expected = root == parts.group.rank ? static_cast<size_t>(parts.group.size) : 0;
  TORCH_CHECK_VALUE(to.size() == expected, "lowcomm: gather: expected ", expected, " outputs on rank ",
                    parts.group.rank, ", got ", to.size());
  for (const auto& output : to) {
    TORCH_CHECK_VALUE(output.numel() == inputs[0].numel() && output.device() == inputs[0].device(),
                      "lowcomm: gather: expected outputs of ", inputs[0].numel(), " elements on ", inputs[0].device(),
                      ", got ", output.numel(), " on ", output.device());
    TORCH_CHECK_TYPE(output.scalar_type() == inputs[0].scalar_type(), "lowcomm: gather: expected outputs of dtype ",
                     inputs[0].scalar_type(), ", got ", output.scalar_type());
    checkOutput(kOp, output);
  }
  const std::vector<CodecSpec> codecs = parts.codecs.codecsOf(kOp, inputs);
  const bool exact = codecs[0].id == CodecId::none;
  auto buffers = std::make_shared<OpBuffers>();
  DeviceQueue* queue = parts.issuer.queueOf(kOp, inputs[0]);
  StagingRequest staged{to, codecs};
  staged.tensors.push_back(inputs[0]);
  buffers->enter(queue, exact ? nullptr : parts.issuer.deviceCodecFor(kOp, queue, staged));
  const WireElements elements(inputs[0]);
  RootGatherMessage message{elements.count, codecs[0], elements.dtype, buffers->source(inputs[0], queue)};
  message.device_codec = buffers->device_codec.get();
  message.type_name = elements.type_name;
  message.type_elements = elements.type_elements;
  for (const auto& output : to)
    message.outputs.push_back(buffers->target(output));
  const uint64_t sequence = ++parts.group.sequence;
  message.draws = parts.draws.ofStep(static_cast<uint32_t>(sequence));
  buffers->run = [message = std::move(message), root](OpContext& context) {
    lowcomm::gather(context, {message}, root);
  };
  return parts.issuer.submit({c10d::OpType::GATHER, kOp, sequence, exact}, inputs, to, queue, std::move(buffers));
}

WorkPtr issueReduce(GroupParts& parts, Tensors& tensors, const c10d::ReduceOptions& opts) {
  constexpr const char* kOp = "reduce";
  std::optional<Reduction> reduction;
  const Tensors real = asReal(tensors, opts.reduceOp);
  const int root = checkedRoot(kOp, opts.rootRank, parts.group.size);
  if (tensors.size() == 1 && parts.issuer.takes(kOp, tensors[0]))
    reduction = ownReduction(opts.reduceOp, real[0].scalar_type());
  if (!reduction) {
    return parts.inner.issue({c10d::OpType::REDUCE, kOp, tensors, tensors},
                             [tensors, opts](c10d::Backend& inner) mutable { return inner.reduce(tensors, opts); });
  }
  parts.group.expectLiving(kOp);
  const bool takes = root == parts.group.rank;
  if (takes) checkOutput(kOp, real[0]);
  auto buffers = std::make_shared<OpBuffers>();
  DeviceQueue* queue = parts.issuer.queueOf(kOp, real[0]);
  buffers->enter(queue);
  RootReduceMessage message{static_cast<uint64_t>(real[0].numel()), wireType(real[0].scalar_type())};
  if (takes) {
    message.input = message.output = buffers->sourceAndTarget(real[0], queue);
  } else {
    message.input = buffers->source(real[0], queue);
  }
  const uint64_t sequence = ++parts.group.sequence;
  buffers->run = [message, root, reduction = *reduction](OpContext& context) {
    lowcomm::reduce(context, {message}, reduction, root);
  };
  return parts.issuer.submit({c10d::OpType::REDUCE, kOp, sequence, /*exact=*/true}, tensors, tensors, queue,
                             std::move(buffers));
}

WorkPtr issueScatter(GroupParts& parts, Tensors& outputs, std::vector<Tensors>& inputs,
                     const c10d::ScatterOptions& opts) {
  constexpr const char* kOp = "scatter";
  const int root = checkedRoot(kOp, opts.rootRank, parts.group.size);
  if (outputs.size() != 1 || !parts.issuer.takes(kOp, outputs[0])) {
    return parts.inner.issue(
        {c10d::OpType::SCATTER, kOp, outputs, outputs},
        [outputs, inputs, opts](c10d::Backend& inner) mutable { return inner.scatter(outputs, inputs, opts); });
  }
  parts.group.expectLiving(kOp);
  const at::Tensor& output = outputs[0];
  const Tensors from = inputs.empty() ? Tensors{} : inputs[0];
  const size_t expected = root == parts.group.rank ? static_cast<size_t>(parts.group.size) : 0;
  TORCH_CHECK_VALUE(from.size() == expected, "lowcomm: scatter: expected ", expected, " inputs on rank ",
                    parts.group.rank, ", got ", from.size());
  for (const auto& input : from) {
    TORCH_CHECK_VALUE(input.numel() == output.numel() && input.device() == output.device(),
                      "lowcomm: scatter: expected inputs of ", output.numel(), " elements on ", output.device(),
                      ", got ", input.numel(), " on ", input.device());
    TORCH_CHECK_TYPE(input.scalar_type() == output.scalar_type(), "lowcomm: scatter: expected inputs of dtype ",
                     output.scalar_type(), ", got ", input.scalar_type());
  }
  checkOutput(kOp, output);
  auto buffers = std::make_shared<OpBuffers>();
  DeviceQueue* queue = parts.issuer.queueOf(kOp, output);
  buffers->enter(queue);
  const WireElements elements(output);
  RootScatterMessage message{elements.count,          elements.dtype,     {},
                             buffers->target(output), elements.type_name, elements.type_elements};
  for (const auto& input : from)
    message.inputs.push_back(buffers->source(input, queue));
  const uint64_t sequence = ++parts.group.sequence;
  buffers->run = [message = std::move(message), root](OpContext& context) {
    lowcomm::scatter(context, {message}, root);
  };
  return parts.issuer.submit({c10d::OpType::SCATTER, kOp, sequence, /*exact=*/true}, from, outputs, queue,
                             std::move(buffers));
}

}  // namespace lowcomm
