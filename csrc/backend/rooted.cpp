// broadcast and gather of codes; exact ones are the inner backend's.
#include "collective/rooted.h"

#include <ATen/ATen.h>

#include "backend/backend.h"
#include "backend/prepared.h"

namespace lowcomm {
namespace {

int checkedRoot(const char* op, int64_t root, int size) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, "lowcomm: ", op, ": expected a root among the group's ranks 0...",
                    size - 1, ", got ", root);
  return static_cast<int>(root);
}

}  // namespace

WorkPtr LowcommBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  constexpr const char* kOp = "broadcast";
  std::optional<std::vector<CodecSpec>> codecs;
  if (named(kOp) && !tensors.empty()) codecs = codecsOf(kOp, tensors);
  if (!codecs) return exactBroadcast(tensors, opts);
  expectLiving(kOp);
  const int root = checkedRoot(kOp, opts.rootRank, size_);
  auto prepared = std::make_shared<Prepared>();
  DeviceQueue* queue = queueOf(tensors[0]);
  const uint64_t key = drawKey();
  const int drawer = globalRank();
  const uint64_t sequence = ++sequence_;
  std::vector<BroadcastMessage> messages;
  prepared->enter(queue, stageFor(kOp, queue, {tensors, *codecs}));
  for (size_t i = 0; i < tensors.size(); ++i) {
    messages.push_back({static_cast<uint64_t>(tensors[i].numel()),
                        (*codecs)[i],
                        wireType(tensors[i].scalar_type()),
                        prepared->sourceAndTarget(tensors[i], queue),
                        {key, streamOf(drawer, static_cast<uint32_t>(i)), static_cast<uint32_t>(sequence)},
                        prepared->stage.get()});
  }
  prepared->run = [messages = std::move(messages), root](OpContext& context) {
    lowcomm::broadcast(context, messages, root);
  };
  stats_.call(kOp, /*exact=*/false);
  return submit(c10d::OpType::BROADCAST, kOp, sequence, tensors, tensors, queue, std::move(prepared));
}

WorkPtr LowcommBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  constexpr const char* kOp = "gather";
  std::optional<std::vector<CodecSpec>> codecs;
  if (named(kOp) && inputs.size() == 1) codecs = codecsOf(kOp, inputs);
  if (!codecs) return exactGather(outputs, inputs, opts);
  expectLiving(kOp);
  const int root = checkedRoot(kOp, opts.rootRank, size_);
  const Tensors none;
  const Tensors& to = outputs.empty() ? none : outputs[0];
  const size_t expected = root == rank_ ? static_cast<size_t>(size_) : 0;
  TORCH_CHECK_VALUE(to.size() == expected, "lowcomm: gather: expected ", expected, " outputs on rank ", rank_, ", got ",
                    to.size());
  auto prepared = std::make_shared<Prepared>();
  RootGatherMessage message;
  for (const auto& output : to) {
    TORCH_CHECK_VALUE(output.numel() == inputs[0].numel() && output.device() == inputs[0].device(),
                      "lowcomm: gather: expected outputs of ", inputs[0].numel(), " elements on ", inputs[0].device(),
                      ", got ", output.numel(), " on ", output.device());
    TORCH_CHECK_TYPE(output.scalar_type() == inputs[0].scalar_type(), "lowcomm: gather: expected outputs of dtype ",
                     inputs[0].scalar_type(), ", got ", output.scalar_type());
  }
  DeviceQueue* queue = queueOf(inputs[0]);
  Staged staged{to, *codecs};
  staged.tensors.push_back(inputs[0]);
  prepared->enter(queue, stageFor(kOp, queue, staged));
  message.elements = static_cast<uint64_t>(inputs[0].numel());
  message.codec = codecs->front();
  message.dtype = wireType(inputs[0].scalar_type());
  message.input = prepared->source(inputs[0], queue);
  message.stage = prepared->stage.get();
  for (const auto& output : to)
    message.outputs.push_back(prepared->target(output));
  const uint64_t sequence = ++sequence_;
  message.draws = {drawKey(), streamOf(globalRank(), 0), static_cast<uint32_t>(sequence)};
  prepared->run = [message = std::move(message), root](OpContext& context) {
    lowcomm::gather(context, {message}, root);
  };
  stats_.call(kOp, /*exact=*/false);
  return submit(c10d::OpType::GATHER, kOp, sequence, inputs, to, queue, std::move(prepared));
}

}  // namespace lowcomm
