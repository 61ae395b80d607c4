#include "tensor/host_parameters.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>
#include <utility>

#include "base/error.h"

namespace lowcomm {

namespace {

constexpr int64_t kAligned = 64;  // bytes: views of the buffer are of any element type

int64_t roomOf(const at::Tensor& tensor) {
  const auto bytes = static_cast<int64_t>(tensor.numel() * tensor.element_size());
  return (bytes + kAligned - 1) / kAligned * kAligned;
}

}  // namespace

HostParameters::HostParameters(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
  int64_t bytes = 0;
  for (at::Tensor& parameter : parameters_) {
    parameter = parameter.detach();
    if (parameter.is_cuda()) bytes += roomOf(parameter);
  }
  copies_.resize(parameters_.size());
  if (bytes == 0) return;
  const at::Tensor buffer = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  int64_t first = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& from = parameters_[i];
    if (!from.is_cuda()) continue;
    const auto [queue, is_new] = queues_.try_emplace(from.device().index(), from.device());
    if (is_new) queue->second.enter();
    const auto size = static_cast<int64_t>(from.numel() * from.element_size());
    copies_[i].pinned = buffer.narrow(0, first, size).view(from.scalar_type()).view(from.sizes());
    queue->second.run([&] { copies_[i].pinned.copy_(from, /*non_blocking=*/true); });
    copies_[i].copied = queue->second.mark();
    first += roomOf(from);
  }
}

const at::Tensor& HostParameters::host(size_t i) const {
  Copy& copy = copies_[i];
  if (!copy.pinned.defined()) return parameters_[i];
  if (copy.copied) DeviceQueue::block(std::exchange(copy.copied, nullptr));
  return copy.pinned;
}

at::Tensor HostParameters::wide(size_t i) const {
  return host(i).to(at::kCPU, at::kFloat).contiguous();
}

void HostParameters::round(size_t i, const at::Tensor& wide) {
  if (!wide.is_alias_of(host(i))) host(i).copy_(wide);
  if (copies_[i].pinned.defined()) send(i);
}

void HostParameters::send(size_t i) {
  queues_.at(parameters_[i].device().index()).run([&] {
    parameters_[i].copy_(copies_[i].pinned, /*non_blocking=*/true);
  });
  copies_[i].sent = true;
}

void HostParameters::store() {
  for (size_t i = 0; i < copies_.size(); ++i) {
    if (copies_[i].pinned.defined() && !copies_[i].sent) send(i);
  }
  for (auto& [index, queue] : queues_) {
    const c10::impl::VirtualGuardImpl guard(queue.device().type());
    queue.mark()->block(guard.getStream(queue.device()));
  }
}

void expectMessageCodec(const char* who, const CodecSpec& codec) {
  if (codec.axis != Axis::channel && !needsTable(codec)) return;
  throw ValueError(std::string(who) + ": codec: expected one of flat tensors without a level table, got '" +
                   codec.str() + "'");
}

CodecSpec poisoning(const CodecSpec& codec) {
  CodecSpec poisons = codec;
  poisons.nonfinite = Nonfinite::poison;
  return misfit(poisons) ? codec : poisons;
}

}  // namespace lowcomm
