// all_gather in every form of c10d, on lowcomm's own exchange.
#include <ATen/ATen.h>

#include <algorithm>

#include "backend/collectives.h"
#include "collective/collectives.h"
#include "tensor/errors.h"
#include "tensor/op_buffers.h"
#include "tensor/wire_type.h"

namespace lowcomm {
namespace {

constexpr const char* kOp = "all_gather";

void checkPair(const at::Tensor& output, const at::Tensor& input, int64_t expected) {
  TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(), "lowcomm: all_gather: expected outputs of dtype ",
                   input.scalar_type(), " as the input, got ", output.scalar_type());
  TORCH_CHECK_VALUE(output.numel() == expected, "lowcomm: all_gather: expected an output of ", expected,
                    " elements, got ", output.numel());
  TORCH_CHECK_VALUE(output.device() == input.device(), "lowcomm: all_gather: expected outputs on ", input.device(),
                    ", got ", output.device());
  checkOutput(kOp, output);
}

// The numbers of elements that ranks contribute, as a description has them.
std::string countsOf(const Tensors& outputs, const at::Tensor& input) {
  std::string text = std::to_string(input.numel());
  if (outputs.size() == 1) return text;
  const bool equal = std::all_of(outputs.begin(), outputs.end(),
                                 [&](const at::Tensor& output) { return output.numel() == input.numel(); });
  if (equal) return text;
  text.clear();
  for (const auto& output : outputs)
    text += (text.empty() ? "" : "/") + std::to_string(output.numel());
  return text;
}

WorkPtr gatherMany(GroupParts& parts, c10d::OpType op, std::vector<Tensors> outputs, Tensors inputs,
                   const Layout* layout, Counter counter) {
  parts.group.expectLiving(kOp);
  auto buffers = std::make_shared<OpBuffers>();
  DeviceQueue* queue = parts.issuer.queueOf(kOp, inputs[0]);
  // The largest rank's contribution: all ranks decide by it.
  uint64_t contribution = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    uint64_t most = inputs[i].nbytes();
    for (const auto& output : outputs[i])
      most = outputs[i].size() == 1 ? most : std::max<uint64_t>(most, output.nbytes());
    contribution += most;
    if (layout) checkCoded(*layout, inputs[i].scalar_type());
  }
  const Draws draws = parts.draws.ofStep(counter.step);
  Tensors all;
  StagingRequest staged{inputs, {}};
  std::vector<std::vector<CodecSpec>> codecs;  // by tensor, then by part
  bool exact = !(layout && layout->coded());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Tensors& by_rank = outputs[i].size() == 1 ? Tensors{inputs[i]} : outputs[i];
    codecs.push_back(layout ? std::vector<CodecSpec>(1) : parts.codecs.codecsOfParts(kOp, by_rank, contribution));
    exact = exact && codecs[i][0].id == CodecId::none;
    staged.codecs.insert(staged.codecs.end(), codecs[i].begin(), codecs[i].end());
    staged.tensors.insert(staged.tensors.end(), outputs[i].begin(), outputs[i].end());
  }
  if (layout) staged.add(*layout);
  buffers->enter(queue, exact ? nullptr : parts.issuer.deviceCodecFor(kOp, queue, staged));
  std::vector<GatherMessage> messages;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& in = inputs[i];
    DType dtype = wireType(in.scalar_type());
    GatherMessage message;
    message.dtype = dtype;
    const uint64_t item = dtype == DType::opaque ? in.element_size() : 1;  // wire elements
    const bool one = outputs[i].size() == 1;                               // one output for all of them, or one a rank
    for (size_t r = 0; r < (one ? 1 : outputs[i].size()); ++r) {
      const uint64_t count = (one ? in.numel() : outputs[i][r].numel()) * item;
      message.layouts.push_back(layout ? *layout : Layout::single(count, codecs[i][r]));
    }
    if (dtype == DType::opaque) {  // the wire sees bytes; ranks compare what they are
      message.type_name = c10::toString(in.scalar_type());
      message.type_elements = countsOf(outputs[i], in);
    }
    message.input = buffers->source(in, queue);
    message.device_codec = buffers->device_codec.get();
    for (auto& output : outputs[i]) {
      auto* base = static_cast<std::byte*>(buffers->target(output));
      const size_t ranks = one ? static_cast<size_t>(parts.group.size) : 1;
      for (size_t r = 0; r < ranks; ++r)
        message.outputs.push_back(base + r * in.nbytes());
      all.push_back(output);
    }
    message.draws = draws.slot(layout ? counter.slot : i);
    messages.push_back(std::move(message));
  }
  const uint64_t sequence =
      ++parts.group.sequence;  // last: a mistake found above must not part this rank's numbers from others'
  for (GatherMessage& message : messages)
    message.draws.step = layout ? counter.step : static_cast<uint32_t>(sequence);
  buffers->run = [messages = std::move(messages)](OpContext& context) { allGather(context, messages); };
  return parts.issuer.submit({op, kOp, sequence, exact}, inputs, all, queue, std::move(buffers));
}

}  // namespace

WorkPtr issueAllGather(GroupParts& parts, std::vector<Tensors>& outputs, Tensors& inputs,
                       const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(inputs.size() == 1 && outputs.size() == 1,
                    "lowcomm: all_gather: expected one input and one output list, got ", inputs.size(), " and ",
                    outputs.size());
  if (!parts.issuer.takes(kOp, inputs[0])) {
    return parts.inner.issue(
        {c10d::OpType::ALLGATHER, kOp, inputs, outputs[0], parts.inner.describe(kOp, inputs)},
        [outputs, inputs, opts](c10d::Backend& inner) mutable { return inner.allgather(outputs, inputs, opts); });
  }
  TORCH_CHECK_VALUE(outputs[0].size() == static_cast<size_t>(parts.group.size), "lowcomm: all_gather: expected ",
                    parts.group.size, " outputs, got ", outputs[0].size());
  checkPair(outputs[0][parts.group.rank], inputs[0], inputs[0].numel());
  for (auto& output : outputs[0])
    checkPair(output, inputs[0], output.numel());  // a rank's part may be longer or shorter than this one's
  return gatherMany(parts, c10d::OpType::ALLGATHER, outputs, inputs, nullptr, {});
}

WorkPtr issueAllGatherBase(GroupParts& parts, at::Tensor& output, at::Tensor& input,
                           const c10d::AllgatherOptions& opts) {
  if (!parts.issuer.takes(kOp, input)) {
    return parts.inner.issue(
        {c10d::OpType::_ALLGATHER_BASE, kOp, {input}, {output}, parts.inner.describe(kOp, {input})},
        [output, input, opts](c10d::Backend& inner) mutable { return inner._allgather_base(output, input, opts); });
  }
  checkPair(output, input, input.numel() * parts.group.size);
  return gatherMany(parts, c10d::OpType::_ALLGATHER_BASE, {{output}}, {input}, nullptr, {});
}

WorkPtr issueAllGatherLists(GroupParts& parts, std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& opts) {
  if (inputs.empty() || !parts.issuer.takes(kOp, inputs[0])) {
    return parts.inner.issue({c10d::OpType::ALLGATHER_COALESCED, kOp, inputs, {}, parts.inner.describe(kOp, inputs)},
                             [outputs, inputs, opts](c10d::Backend& inner) mutable {
                               return inner.allgather_coalesced(outputs, inputs, opts);
                             });
  }
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(parts.group.size), "lowcomm: all_gather: expected ",
                    parts.group.size, " output lists, got ", outputs.size());
  std::vector<Tensors> by_input(inputs.size());
  for (auto& list : outputs) {
    TORCH_CHECK_VALUE(list.size() == inputs.size(), "lowcomm: all_gather: expected ", inputs.size(),
                      " outputs a rank, got ", list.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      checkPair(list[i], inputs[i], inputs[i].numel());
      by_input[i].push_back(list[i]);
    }
  }
  return gatherMany(parts, c10d::OpType::ALLGATHER_COALESCED, std::move(by_input), inputs, nullptr, {});
}

WorkPtr issueAllGatherCoalesced(GroupParts& parts, Tensors& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) {
  if (inputs.empty() || !parts.issuer.takes(kOp, inputs[0])) {
    return parts.inner.issue({c10d::OpType::COALESCED, kOp, inputs, outputs, parts.inner.describe(kOp, inputs)},
                             [outputs, inputs, opts](c10d::Backend& inner) mutable {
                               return inner.allgather_into_tensor_coalesced(outputs, inputs, opts);
                             });
  }
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "lowcomm: all_gather: expected ", inputs.size(), " outputs, got ",
                    outputs.size());
  std::vector<Tensors> by_input;
  for (size_t i = 0; i < inputs.size(); ++i) {
    checkPair(outputs[i], inputs[i], inputs[i].numel() * parts.group.size);
    by_input.push_back({outputs[i]});
  }
  return gatherMany(parts, c10d::OpType::COALESCED, std::move(by_input), inputs, nullptr, {});
}

WorkPtr issueAllGatherLayout(GroupParts& parts, const at::Tensor& output, const at::Tensor& input, const Layout& layout,
                             Counter counter) {
  checkPair(output, input, input.numel() * parts.group.size);
  TORCH_CHECK_VALUE(static_cast<uint64_t>(input.numel()) == layout.elements(),
                    "lowcomm: all_gather by layout: expected an input of ", layout.elements(), " elements, got ",
                    input.numel());
  return gatherMany(parts, c10d::OpType::_ALLGATHER_BASE, {{output}}, {input}, &layout, counter);
}

}  // namespace lowcomm
