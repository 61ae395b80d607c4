// all_gather in every form of c10d, on lowcomm's own exchange.
#include <ATen/ATen.h>

#include <algorithm>

#include "backend/backend.h"
#include "tensor/op_buffers.h"
#include "tensor/op_checks.h"

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
  const bool alike = std::all_of(outputs.begin(), outputs.end(),
                                 [&](const at::Tensor& output) { return output.numel() == input.numel(); });
  if (alike) return text;
  text.clear();
  for (const auto& output : outputs)
    text += (text.empty() ? "" : "/") + std::to_string(output.numel());
  return text;
}

}  // namespace

// What stochastic codecs draw by: groups of other ranks (the replicas of HSDP) must not share this rank's draws.
int LowcommBackend::globalRank() const {
  const auto& global = options_->global_ranks_in_group;
  return static_cast<size_t>(rank_) < global.size() ? static_cast<int>(global[rank_]) : rank_;
}

// The codec of each part of a tensor of a collective, by the part's own shape: all ranks have all shapes where the
// parts are a list, and decide alike. All parts travel exact where one must.
std::vector<CodecSpec> LowcommBackend::codecsOfParts(const std::string& op, const Tensors& parts,
                                                     uint64_t contribution) {
  std::vector<CodecSpec> codecs;
  for (const auto& part : parts) {
    const auto codec = chooseCodec(op, part, contribution);
    if (!codec) return std::vector<CodecSpec>(parts.size());
    codecs.push_back(*codec);
  }
  return codecs;
}

WorkPtr LowcommBackend::gatherMany(c10d::OpType op, std::vector<Tensors> outputs, Tensors inputs, const Layout* layout,
                                   Counter counter) {
  expectLiving(kOp);
  auto buffers = std::make_shared<OpBuffers>();
  DeviceQueue* queue = queueOf(kOp, inputs[0]);
  // Of the largest rank: what ranks decide alike by.
  uint64_t contribution = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    uint64_t most = inputs[i].nbytes();
    for (const auto& output : outputs[i])
      most = outputs[i].size() == 1 ? most : std::max<uint64_t>(most, output.nbytes());
    contribution += most;
    if (layout) checkCoded(*layout, inputs[i].scalar_type());
  }
  const uint64_t key = drawKey();
  const int drawer = globalRank();
  Tensors all;
  StagingRequest staged{inputs, {}};
  std::vector<std::vector<CodecSpec>> codecs;  // by tensor, then by part
  bool exact = !(layout && layout->coded());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Tensors& parts = outputs[i].size() == 1 ? Tensors{inputs[i]} : outputs[i];
    codecs.push_back(layout ? std::vector<CodecSpec>(1) : codecsOfParts(kOp, parts, contribution));
    exact = exact && codecs[i][0].id == CodecId::none;
    staged.codecs.insert(staged.codecs.end(), codecs[i].begin(), codecs[i].end());
    staged.tensors.insert(staged.tensors.end(), outputs[i].begin(), outputs[i].end());
  }
  if (layout) staged.add(*layout);
  buffers->enter(queue, exact ? nullptr : deviceCodecFor(kOp, queue, staged));
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
      const size_t ranks = one ? static_cast<size_t>(size_) : 1;
      for (size_t r = 0; r < ranks; ++r)
        message.outputs.push_back(base + r * in.nbytes());
      all.push_back(output);
    }
    message.draws = Draws{key, streamOf(drawer, 0), counter.step}.slot(layout ? counter.slot : i);
    messages.push_back(std::move(message));
  }
  const uint64_t sequence = ++sequence_;  // last: a mistake found above must not part this rank's numbers from others'
  for (GatherMessage& message : messages)
    message.draws.step = layout ? counter.step : static_cast<uint32_t>(sequence);
  buffers->run = [messages = std::move(messages)](OpContext& context) { allGather(context, messages); };
  return submit({op, kOp, sequence, exact}, inputs, all, queue, std::move(buffers));
}

WorkPtr LowcommBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return inBlock(c10d::OpType::ALLGATHER, [&]() -> WorkPtr {
    TORCH_CHECK_VALUE(inputs.size() == 1 && outputs.size() == 1,
                      "lowcomm: all_gather: expected one input and one output list, got ", inputs.size(), " and ",
                      outputs.size());
    if (!ownOp(inputs[0], kOp)) {
      return viaInner(
          {c10d::OpType::ALLGATHER, kOp, inputs, outputs[0], describeForInner(kOp, inputs, {})},
          [outputs, inputs, opts](c10d::Backend& inner) mutable { return inner.allgather(outputs, inputs, opts); });
    }
    TORCH_CHECK_VALUE(outputs[0].size() == static_cast<size_t>(size_), "lowcomm: all_gather: expected ", size_,
                      " outputs, got ", outputs[0].size());
    checkPair(outputs[0][rank_], inputs[0], inputs[0].numel());
    for (auto& output : outputs[0])
      checkPair(output, inputs[0], output.numel());  // a rank's part may be longer or shorter than this one's
    return gatherMany(c10d::OpType::ALLGATHER, outputs, inputs, nullptr, {});
  });
}

WorkPtr LowcommBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  return inBlock(c10d::OpType::_ALLGATHER_BASE, [&]() -> WorkPtr {
    if (!ownOp(input, kOp)) {
      return viaInner(
          {c10d::OpType::_ALLGATHER_BASE, kOp, {input}, {output}, describeForInner(kOp, {input}, {})},
          [output, input, opts](c10d::Backend& inner) mutable { return inner._allgather_base(output, input, opts); });
    }
    checkPair(output, input, input.numel() * size_);
    return gatherMany(c10d::OpType::_ALLGATHER_BASE, {{output}}, {input}, nullptr, {});
  });
}

WorkPtr LowcommBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) {
  return inBlock(c10d::OpType::ALLGATHER_COALESCED, [&]() -> WorkPtr {
    if (inputs.empty() || !ownOp(inputs[0], kOp)) {
      return viaInner({c10d::OpType::ALLGATHER_COALESCED, kOp, inputs, {}, describeForInner(kOp, inputs, {})},
                      [outputs, inputs, opts](c10d::Backend& inner) mutable {
                        return inner.allgather_coalesced(outputs, inputs, opts);
                      });
    }
    TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_), "lowcomm: all_gather: expected ", size_,
                      " output lists, got ", outputs.size());
    std::vector<Tensors> by_input(inputs.size());
    for (auto& list : outputs) {
      TORCH_CHECK_VALUE(list.size() == inputs.size(), "lowcomm: all_gather: expected ", inputs.size(),
                        " outputs a rank, got ", list.size());
      for (size_t i = 0; i < inputs.size(); ++i) {
        checkPair(list[i], inputs[i], inputs[i].numel());
        by_input[i].push_back(list[i]);
      }
    }
    return gatherMany(c10d::OpType::ALLGATHER_COALESCED, std::move(by_input), inputs, nullptr, {});
  });
}

WorkPtr LowcommBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& opts) {
  return inBlock(c10d::OpType::COALESCED, [&]() -> WorkPtr {
    if (inputs.empty() || !ownOp(inputs[0], kOp)) {
      return viaInner({c10d::OpType::COALESCED, kOp, inputs, outputs, describeForInner(kOp, inputs, {})},
                      [outputs, inputs, opts](c10d::Backend& inner) mutable {
                        return inner.allgather_into_tensor_coalesced(outputs, inputs, opts);
                      });
    }
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "lowcomm: all_gather: expected ", inputs.size(),
                      " outputs, got ", outputs.size());
    std::vector<Tensors> by_input;
    for (size_t i = 0; i < inputs.size(); ++i) {
      checkPair(outputs[i], inputs[i], inputs[i].numel() * size_);
      by_input.push_back({outputs[i]});
    }
    return gatherMany(c10d::OpType::COALESCED, std::move(by_input), inputs, nullptr, {});
  });
}

WorkPtr LowcommBackend::allGatherLayout(const at::Tensor& output, const at::Tensor& input, const Layout& layout,
                                        Counter counter) {
  return inBlock(c10d::OpType::_ALLGATHER_BASE, [&]() -> WorkPtr {
    checkPair(output, input, input.numel() * size_);
    TORCH_CHECK_VALUE(static_cast<uint64_t>(input.numel()) == layout.elements(),
                      "lowcomm: all_gather by layout: expected an input of ", layout.elements(), " elements, got ",
                      input.numel());
    return gatherMany(c10d::OpType::_ALLGATHER_BASE, {{output}}, {input}, &layout, counter);
  });
}

}  // namespace lowcomm
