// How CUDA tensors of an own op travel: staged, which is that only their codes are copied, or as copies of their values
// that the host encodes.
#include <ATen/ATen.h>

#include <algorithm>

#include "backend/backend.h"
#include "tensor/device_codec_queue.h"
#include "tensor/wire_type.h"

namespace lowcomm {
namespace {

bool dense(const at::Tensor& tensor, const c10::Device& device) {
  return tensor.device() == device && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

void LowcommBackend::StagingRequest::add(const Layout& layout) {
  for (const Segment& segment : layout.segments())
    codecs.push_back(segment.codec);
}

std::shared_ptr<DeviceCodec> LowcommBackend::deviceCodecFor(const std::string& op, DeviceQueue* queue,
                                                            const StagingRequest& staged) {
  if (!queue) return nullptr;
  std::string because;
  std::unique_ptr<CodecKernels> kernels;
  const auto saturates = [](const CodecSpec& codec) { return codec.nonfinite == Nonfinite::saturate; };
  if (!settings().staged) {
    because = "staged=False";
  } else if (size_ == 1) {
    because = "a group of one rank";
  } else if (!staged.because.empty()) {
    because = staged.because;
  } else if (!std::all_of(staged.tensors.begin(), staged.tensors.end(),
                          [&](const at::Tensor& tensor) { return dense(tensor, queue->device()); })) {
    because = "a tensor that is not contiguous on one device";
  } else if (staged.keeps_own && std::any_of(staged.codecs.begin(), staged.codecs.end(), saturates)) {
    because = "nonfinite=saturate";
  } else {
    kernels = stageKernels(*queue, because);
  }
  for (const auto& tensor : staged.tensors) {
    for (const CodecSpec& codec : staged.codecs) {
      if (kernels && !kernels->takes(codec, wireType(tensor.scalar_type()))) {
        because = codec.str() + " of " + c10::toString(tensor.scalar_type());
        kernels.reset();
      }
    }
  }
  if (!kernels) {
    if (stats_.unstaged(op, because)) {
      LOG(INFO) << "lowcomm: group " << groupName() << ": " << op
                << " copies the values of CUDA tensors to the host, not their codes: " << because;
    }
    return nullptr;
  }
  stats_.staged(op);
  return std::make_shared<DeviceCodec>(std::make_unique<DeviceCodecQueue>(*queue), std::move(kernels),
                                       engine().group().chunk_bytes);
}

}  // namespace lowcomm
