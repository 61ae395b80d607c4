#pragma once

#include <functional>

#include "collective/device_codec.h"
#include "tensor/device_queue.h"

namespace lowcomm {

// What a DeviceCodec needs of a device, by c10's device-generic guard: no CUDA header, and a fake guard can stand in
// for a device in tests. Device memory is of torch's allocator for the device, taken while the side stream is current:
// it is that stream's, and may go back while the stream still works on it. Marks are events of the side stream.
class DeviceCodecQueue final : public CodecQueue {
 public:
  using Allocate = std::function<Memory(size_t bytes)>;

  // `pinned` gives memory that copies to and from the device may be enqueued for; without it torch's allocator does.
  explicit DeviceCodecQueue(const DeviceQueue& queue, Allocate pinned = nullptr);

  Memory deviceMemory(size_t bytes) override;
  Memory pinnedMemory(size_t bytes) override;
  Wait mark() override;

 private:
  DeviceQueue queue_;
  const Allocate pinned_;
};

// The kernels of this build for that queue's device, or nothing: the build has none, or none that run there. `because`
// then says which.
std::unique_ptr<CodecKernels> codecKernels(const DeviceQueue& queue, std::string& because);

}  // namespace lowcomm
