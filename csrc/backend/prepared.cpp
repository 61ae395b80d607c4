#include "backend/prepared.h"

#include <ATen/ATen.h>

#include <utility>

namespace lowcomm {
namespace {

bool plain(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

void LowcommBackend::Prepared::enter(DeviceQueue* queue, std::shared_ptr<Stage> given) {
  if (!queue) return;
  stage = std::move(given);
  issued = queue->reached();
  if (!stage) queue->follow(issued);
}

at::Tensor LowcommBackend::Prepared::readable(const at::Tensor& input, DeviceQueue* queue) {
  at::NoGradGuard no_grad;
  at::Tensor host;
  if (queue) {
    queue->run([&] {
      at::Tensor dense = input.contiguous();
      host = at::empty(dense.sizes(), dense.options().device(at::kCPU).pinned_memory(true));
      host.copy_(dense, /*non_blocking=*/true);
      kept.push_back(dense);
    });
    to_host += host.nbytes();
    landed = queue->mark();
  } else {
    host = plain(input) ? input : input.resolve_conj().resolve_neg().contiguous();
  }
  kept.push_back(host);
  return host;
}

at::Tensor LowcommBackend::Prepared::writable(const at::Tensor& output) {
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

at::Tensor LowcommBackend::Prepared::inPlace(const at::Tensor& tensor, DeviceQueue* queue) {
  at::Tensor host = readable(tensor, queue);
  if (!plain(tensor)) copies_out.emplace_back(tensor, host);
  return host;
}

const void* LowcommBackend::Prepared::source(const at::Tensor& input, DeviceQueue* queue) {
  return stage ? input.const_data_ptr() : readable(input, queue).const_data_ptr();
}

void* LowcommBackend::Prepared::target(const at::Tensor& output) {
  return stage ? output.mutable_data_ptr() : writable(output).mutable_data_ptr();
}

void* LowcommBackend::Prepared::sourceAndTarget(const at::Tensor& tensor, DeviceQueue* queue) {
  return stage ? tensor.mutable_data_ptr() : inPlace(tensor, queue).mutable_data_ptr();
}

void LowcommBackend::Prepared::count(OpCounters& counters) const {
  if (stage) {
    counters.device_to_host_bytes += stage->hostBytes();
    counters.host_to_device_bytes += stage->deviceBytes();
    return;
  }
  counters.device_to_host_bytes += to_host;
  for (const auto& [to, from] : copies_out)
    counters.host_to_device_bytes += to.is_cpu() ? 0 : from.nbytes();
}

void LowcommBackend::Prepared::start(DeviceQueue* queue) {
  if (stage) queue->follow(issued);
  if (landed) DeviceQueue::block(landed);
}

void LowcommBackend::Prepared::finish(DeviceQueue* queue) {
  at::NoGradGuard no_grad;
  auto copy = [&] {
    for (auto& [to, from] : copies_out)
      to.copy_(from, /*non_blocking=*/true);
  };
  if (queue) {
    queue->run(copy);
    arrived = queue->mark();
  } else {
    copy();
  }
}

}  // namespace lowcomm
