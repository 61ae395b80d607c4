#include "tensor/op_buffers.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace lowcomm {
namespace {

bool plain(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

void OpBuffers::enter(DeviceQueue* queue, std::shared_ptr<DeviceCodec> given) {
  if (!queue) return;
  device_codec = std::move(given);
  issued = queue->reached();
}

at::Tensor OpBuffers::readable(const at::Tensor& input, DeviceQueue* queue) {
  at::NoGradGuard no_grad;
  at::Tensor host = input;
  if (queue) {
    host = at::empty(input.sizes(), input.options().device(at::kCPU).pinned_memory(true));
    copies_in.emplace_back(host, input);
    to_host += host.nbytes();
  } else if (!plain(input)) {
    host = at::empty(input.sizes(), input.options().memory_format(at::MemoryFormat::Contiguous));
    copies_in.emplace_back(host, input);
  }
  kept.push_back(host);
  return host;
}

at::Tensor OpBuffers::writable(const at::Tensor& output) {
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

at::Tensor OpBuffers::inPlace(const at::Tensor& tensor, DeviceQueue* queue) {
  at::Tensor host = readable(tensor, queue);
  if (!plain(tensor)) copies_out.emplace_back(tensor, host);
  return host;
}

const void* OpBuffers::source(const at::Tensor& input, DeviceQueue* queue) {
  return device_codec ? input.const_data_ptr() : readable(input, queue).const_data_ptr();
}

void* OpBuffers::target(const at::Tensor& output) {
  return device_codec ? output.mutable_data_ptr() : writable(output).mutable_data_ptr();
}

void* OpBuffers::sourceAndTarget(const at::Tensor& tensor, DeviceQueue* queue) {
  return device_codec ? tensor.mutable_data_ptr() : inPlace(tensor, queue).mutable_data_ptr();
}

std::vector<void*> OpBuffers::sourcesAndTargets(const std::vector<at::Tensor>& tensors, DeviceQueue* queue) {
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

void OpBuffers::count(OpCounters& counters) const {
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

void OpBuffers::load(DeviceQueue* queue) {
  if (!issued) return;
  at::NoGradGuard no_grad;
  queue->follow(issued);
  issued.reset();
  if (copies_in.empty() && packs.empty()) return;
  reading = queue->stream();
  queue->run([&] {
    for (auto& [to, from] : copies_in)
      to.copy_(from, /*non_blocking=*/true);
    for (const Pack& pack : packs) {
      std::vector<at::Tensor> flat;
      for (const auto& part : pack.parts)
        flat.push_back(part.view(-1));
      pack.host.copy_(at::cat(flat), /*non_blocking=*/true);
    }
  });
  landed = queue->mark();
}

std::vector<at::Tensor> OpBuffers::reads() const {
  std::vector<at::Tensor> all;
  for (const auto& [to, from] : copies_in)
    all.push_back(from);
  for (const Pack& pack : packs)
    all.insert(all.end(), pack.parts.begin(), pack.parts.end());
  return all;
}

void OpBuffers::start(DeviceQueue* queue) {
  if (failed) std::rethrow_exception(failed);
  load(queue);
  if (landed) DeviceQueue::block(landed);
  reading.reset();
  at::NoGradGuard no_grad;
  for (size_t i = 0; !queue && i < copies_in.size(); ++i)
    copies_in[i].first.copy_(copies_in[i].second);
  copies_in.clear();
}

void OpBuffers::finish(DeviceQueue* queue) {
  at::NoGradGuard no_grad;
  auto copy = [&] {
    for (auto& [to, from] : copies_out)
      to.copy_(from, /*non_blocking=*/true);
    for (Pack& pack : packs) {
      const at::Tensor flat = at::empty(pack.host.sizes(), pack.parts[0].options());
      flat.copy_(pack.host, /*non_blocking=*/true);
      std::vector<at::Tensor> from;
      int64_t first = 0;
      for (const auto& part : pack.parts) {
        from.push_back(flat.narrow(0, first, part.numel()).view(part.sizes()));
        first += part.numel();
      }
      at::_foreach_copy_(pack.parts, from, /*non_blocking=*/true);
    }
  };
  if (!queue) return copy();
  queue->run(copy);
  DeviceQueue::block(queue->mark());
}

void OpBuffers::release() {
  for (const at::Tensor& tensor : reading ? reads() : std::vector<at::Tensor>())
    c10::impl::VirtualGuardImpl(reading->device_type()).recordDataPtrOnStream(tensor.storage().data_ptr(), *reading);
  *this = {};
}

}  // namespace lowcomm
