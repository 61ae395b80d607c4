#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "codec/spec.h"

namespace lowcomm {

// Parameters in host memory for a pass over them. Those of CUDA devices come there and go back through one pinned
// buffer, with one wait for all of them: one by one and pageable they would take several times as long.
class HostParameters {
 public:
  // Waits until the device has copied; of other tensors nothing is copied yet.
  explicit HostParameters(std::vector<at::Tensor> parameters);

  // The parameter's copy in host memory, of its own type; the parameter itself where it is there.
  const at::Tensor& host(size_t i) const { return pinned_[i].defined() ? pinned_[i] : parameters_[i]; }

  // fp32 and contiguous: the parameter's own memory where it is that on the host.
  at::Tensor wide(size_t i) const;

  // Rounds what a pass made of wide(i) to the parameter's type. wide(i) is that from then on.
  void round(size_t i, const at::Tensor& wide);

  // The CUDA parameters become what they were rounded to: enqueued on each device's current stream.
  void store() const;

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> pinned_;  // of a parameter's type and shape; undefined where it is on the host
};

// Throws ValueError in the name of the optimizer `who` unless its messages can have this codec: of flat tensors,
// without a level table, and by which a NaN arrives, for all ranks to see it.
void expectMessageCodec(const char* who, const CodecSpec& codec);

// The same codec with nonfinite=poison, by which a NaN arrives; itself where that does not fit: some have no other way.
CodecSpec poisoning(const CodecSpec& codec);

}  // namespace lowcomm
