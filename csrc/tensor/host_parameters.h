#pragma once

#include <ATen/ATen.h>

#include <map>
#include <vector>

#include "codec/spec.h"
#include "tensor/device_queue.h"

namespace lowcomm {

// Parameters in host memory for a pass over them. Those of CUDA devices come there and go back through one pinned
// buffer and a copy stream a device: the copy of one overlaps the pass over those before it, and its way back the pass
// over those behind it.
class HostParameters {
 public:
  // The copy streams wait for what is enqueued on each device's current stream; of other tensors nothing is copied yet.
  explicit HostParameters(std::vector<at::Tensor> parameters);

  // The parameter's copy in host memory, of its own type, once the device has copied it; the parameter itself where it
  // is there.
  const at::Tensor& host(size_t i) const;

  // fp32 and contiguous: the parameter's own memory where it is that on the host.
  at::Tensor wide(size_t i) const;

  // Rounds what a pass made of wide(i) to the parameter's type, and sends it to its device. wide(i) is that from then
  // on, and not to be written any more.
  void round(size_t i, const at::Tensor& wide);

  // Sends what round() has not, and each device's current stream waits for what was sent.
  void store();

 private:
  // A CUDA parameter's.
  struct Copy {
    at::Tensor pinned;         // of its type and shape; undefined where it is on the host
    DeviceQueue::Mark copied;  // null: it has been waited for
    bool sent = false;
  };
  void send(size_t i);

  std::vector<at::Tensor> parameters_;
  mutable std::vector<Copy> copies_;
  std::map<c10::DeviceIndex, DeviceQueue> queues_;
};

// Throws ValueError in the name of the optimizer `who` unless its messages can have this codec: of flat tensors,
// without a level table, and by which a NaN arrives, for all ranks to see it.
void expectMessageCodec(const char* who, const CodecSpec& codec);

// The same codec with nonfinite=poison, by which a NaN arrives; itself where that does not fit: some have no other way.
CodecSpec poisoning(const CodecSpec& codec);

}  // namespace lowcomm
