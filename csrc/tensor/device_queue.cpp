#include "tensor/device_queue.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "cuda/accumulate.h"
#include "cuda/run_kernels.h"

namespace lowcomm {

namespace {

c10::Stream sideStream(c10::Device device) {
  c10::DeviceGuard guard(device);
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

c10::Stream currentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

AskCapturing installed = nullptr;
MakeKernels simulated = nullptr;

template <class Stream>
bool captures(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) {
    return stream.is_capturing();
  } else {
    return installed && installed();
  }
}

}  // namespace

void setAskCapturing(AskCapturing ask) {
  installed = ask;
}

void setCodecKernels(MakeKernels make) {
  simulated = make;
}

bool DeviceQueue::capturing(c10::Device device) {
  return captures(currentStream(device));
}

DeviceQueue::DeviceQueue(c10::Device device) : device_(device), side_(sideStream(device)) {}

DeviceQueue::Mark DeviceQueue::reached() const {
  auto event = std::make_shared<c10::Event>(device_.type());
  event->record(currentStream(device_));
  return event;
}

void DeviceQueue::follow(const Mark& mark) {
  mark->block(side_);
}

void DeviceQueue::run(const std::function<void()>& enqueue) {
  c10::StreamGuard guard(side_);
  enqueue();
}

DeviceQueue::Mark DeviceQueue::mark() {
  auto event = std::make_shared<c10::Event>(device_.type());
  event->record(side_);
  return event;
}

void DeviceQueue::block(const Mark& mark) {
  mark->synchronize();
}

void DeviceQueue::occupy(c10::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
}

namespace {

CodecQueue::Memory pinnedByTorch(size_t bytes) {
  at::Tensor memory = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).pinned_memory(true));
  auto* data = static_cast<std::byte*>(memory.mutable_data_ptr());
  return {data, [held = std::move(memory)](std::byte*) mutable { held.reset(); }};
}

}  // namespace

DeviceCodecQueue::DeviceCodecQueue(const DeviceQueue& queue, Allocate pinned)
    : queue_(queue), pinned_(pinned ? std::move(pinned) : pinnedByTorch) {}

CodecQueue::Memory DeviceCodecQueue::deviceMemory(size_t bytes) {
  auto memory = std::make_shared<c10::DataPtr>();
  queue_.run([&] { *memory = c10::GetAllocator(queue_.device().type())->allocate(bytes); });
  return {memory, static_cast<std::byte*>(memory->get())};
}

CodecQueue::Memory DeviceCodecQueue::pinnedMemory(size_t bytes) {
  Memory memory;
  queue_.run([&] { memory = pinned_(bytes); });
  return memory;
}

CodecQueue::Wait DeviceCodecQueue::mark() {
  return [mark = queue_.mark()] { DeviceQueue::block(mark); };
}

std::unique_ptr<CodecKernels> codecKernels([[maybe_unused]] const DeviceQueue& queue, std::string& because) {
  if (simulated) return simulated();
#if LOWCOMM_CUDA_KERNELS
  const auto handle = handleOf(queue.stream());
  if (!handle) {
    because = "this torch does not tell a stream's handle";
    return nullptr;
  }
  const int device = queue.device().index();
  if (!cuda::runsOn(device)) {
    because = "no CUDA kernels for this device in the build";
    return nullptr;
  }
  return std::make_unique<cuda::RunKernels>(cuda::Place{device, static_cast<CUstream_st*>(*handle)});
#else
  because = "no CUDA kernels in the build";
  return nullptr;
#endif
}

}  // namespace lowcomm
