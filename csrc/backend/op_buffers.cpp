#include "backend/op_buffers.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <utility>

namespace lowcomm {
namespace {

bool plain(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

void checkOutput(const char* op, const at::Tensor& output) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(output) != at::MemOverlap::Yes, "lowcomm: ", op,
                    ": expected an output without elements that share memory, got shape ", output.sizes(),
                    " with strides ", output.strides());
}

void checkOutputs(const char* op, const std::vector<at::Tensor>& outputs) {
  std::vector<const at::Tensor*> by_address;
  for (const auto& output : outputs) {
    if (!output.defined() || output.layout() != at::kStrided || output.numel() == 0) continue;
    checkOutput(op, output);
    if (output.is_non_overlapping_and_dense()) by_address.push_back(&output);
  }
  const auto begin = [](const at::Tensor* output) { return static_cast<const std::byte*>(output->const_data_ptr()); };
  std::sort(by_address.begin(), by_address.end(),
            [&](const at::Tensor* a, const at::Tensor* b) { return begin(a) < begin(b); });
  for (size_t i = 1; i < by_address.size(); ++i) {
    const at::Tensor *a = by_address[i - 1], *b = by_address[i];
    TORCH_CHECK_VALUE(a->device() != b->device() || begin(a) + a->nbytes() <= begin(b), "lowcomm: ", op,
                      ": expected outputs that share no memory, got two of shapes ", a->sizes(), " and ", b->sizes(),
                      " that do");
  }
}

void LowcommBackend::OpBuffers::enter(DeviceQueue* queue, std::shared_ptr<DeviceCodec> given) {
  if (!queue) return;
  device_codec = std::move(given);
  issued = queue->reached();
}

at::Tensor LowcommBackend::OpBuffers::readable(const at::Tensor& input, DeviceQueue* queue) {
  at::NoGradGuard no_grad;
  at::Tensor host;
  if (queue) {
    host = at::empty(input.sizes(), input.options().device(at::kCPU).pinned_memory(true));
    copies_in.emplace_back(host, input);
    to_host += host.nbytes();
  } else {
    host = input;
    if (!plain(input)) {
      host = at::empty(input.sizes(), input.options().memory_format(at::MemoryFormat::Contiguous));
      copies_in.emplace_back(host, input);
    }
  }
  kept.push_back(host);
  return host;
}

at::Tensor LowcommBackend::OpBuffers::writable(const at::Tensor& output) {
  at::NoGradGuard no_grad;
  at::Tensor host = output;
  if (!plain(output)) {
    auto options = output.options().device(at::kCPU).pinned_memory(!output.device().is_cpu());
    host = at::empty(output.sizes(), options);
    copies_out.emplace_back(output, host);
  }
  kept.push_back(host);
  return host;
}

at::Tensor LowcommBackend::OpBuffers::inPlace(const at::Tensor& tensor, DeviceQueue* queue) {
  at::Tensor host = readable(tensor, queue);
  if (!plain(tensor)) copies_out.emplace_back(tensor, host);
  return host;
}

const void* LowcommBackend::OpBuffers::source(const at::Tensor& input, DeviceQueue* queue) {
  return device_codec ? input.const_data_ptr() : readable(input, queue).const_data_ptr();
}

void* LowcommBackend::OpBuffers::target(const at::Tensor& output) {
  return device_codec ? output.mutable_data_ptr() : writable(output).mutable_data_ptr();
}

void* LowcommBackend::OpBuffers::sourceAndTarget(const at::Tensor& tensor, DeviceQueue* queue) {
  return device_codec ? tensor.mutable_data_ptr() : inPlace(tensor, queue).mutable_data_ptr();
}

std::vector<void*> LowcommBackend::OpBuffers::sourcesAndTargets(const Tensors& tensors, DeviceQueue* queue) {
  std::vector<void*> at;
  if (!queue || device_codec) {
    for (const auto& tensor : tensors)
      at.push_back(sourceAndTarget(tensor, queue));
    return at;
  }
  int64_t elements = 0;
  for (const auto& tensor : tensors)
    elements += tensor.numel();
  const at::Tensor host = at::empty({elements}, tensors[0].options().device(at::kCPU).pinned_memory(true));
  packs.push_back({host, tensors});
  kept.push_back(host);
  to_host += host.nbytes();
  auto* next = static_cast<std::byte*>(host.mutable_data_ptr());
  for (const auto& tensor : tensors) {
    at.push_back(next);
    next += tensor.nbytes();
  }
  return at;
}

void LowcommBackend::OpBuffers::count(OpCounters& counters) const {
  if (device_codec) {
    counters.device_to_host_bytes += device_codec->hostBytes();
    counters.host_to_device_bytes += device_codec->deviceBytes();
    return;
  }
  counters.device_to_host_bytes += to_host;
  for (const auto& [to, from] : copies_out)
    counters.host_to_device_bytes += to.is_cpu() ? 0 : from.nbytes();
  for (const Pack& pack : packs)
    counters.host_to_device_bytes += pack.host.nbytes();
}

void LowcommBackend::OpBuffers::load(DeviceQueue* queue) {
  if (!issued) return;
  at::NoGradGuard no_grad;
  queue->follow(issued);
  issued.reset();
  if (copies_in.empty() && packs.empty()) return;
  queue->run([&] {
    for (auto& [to, from] : copies_in)
      to.copy_(from, /*non_blocking=*/true);
    for (const Pack& pack : packs) {
      Tensors flat;
      for (const auto& part : pack.parts)
        flat.push_back(part.view(-1));
      pack.host.copy_(at::cat(flat), /*non_blocking=*/true);
    }
  });
  landed = queue->mark();
}

void LowcommBackend::OpBuffers::start(DeviceQueue* queue) {
  load(queue);
  if (landed) DeviceQueue::block(landed);
  at::NoGradGuard no_grad;
  for (size_t i = 0; !queue && i < copies_in.size(); ++i)
    copies_in[i].first.copy_(copies_in[i].second);
  copies_in.clear();
}

void LowcommBackend::OpBuffers::finish(DeviceQueue* queue) {
  at::NoGradGuard no_grad;
  auto copy = [&] {
    for (auto& [to, from] : copies_out)
      to.copy_(from, /*non_blocking=*/true);
    for (Pack& pack : packs) {
      const at::Tensor flat = at::empty(pack.host.sizes(), pack.parts[0].options());
      flat.copy_(pack.host, /*non_blocking=*/true);
      Tensors from;
      int64_t first = 0;
      for (const auto& part : pack.parts) {
        from.push_back(flat.narrow(0, first, part.numel()).view(part.sizes()));
        first += part.numel();
      }
      at::_foreach_copy_(pack.parts, from, /*non_blocking=*/true);
    }
  };
  if (queue) {
    queue->run(copy);
    DeviceQueue::block(queue->mark());
  } else {
    copy();
  }
}

}  // namespace lowcomm
