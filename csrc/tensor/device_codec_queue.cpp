#include "tensor/device_codec_queue.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <memory>
#include <optional>
#include <utility>

#if LOWCOMM_CUDA_KERNELS
#include "cuda/accumulate.h"
#include "cuda/run_kernels.h"
#include "tensor/stream_handle.h"
#endif

namespace lowcomm {
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
