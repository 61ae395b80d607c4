#include "subspace/device_anchor.h"

#include "base/error.h"

#if LOWCOMM_CUDA_KERNELS
#include <c10/core/impl/VirtualGuardImpl.h>

#include "cuda/accumulate.h"
#include "cuda/token_rows.h"
#include "tensor/device_queue.h"
#endif

namespace lowcomm {

#if LOWCOMM_CUDA_KERNELS
at::Tensor addAnchorOnDevice(const at::Tensor& x, const at::Tensor& tokens, const SubspaceAnchor& anchor, float sign) {
  const c10::Device device = x.device();
  if (!device.is_cuda() || !cuda::runsOn(device.index())) {
    throw ValueError(
        "subspace: activations: expected them on the host or on a CUDA device that this build has kernels "
        "for, got " +
        device.str());
  }
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const cuda::Place place{device.index(), static_cast<CUstream_st*>(handleOf(stream).value())};
  const int64_t width = x.size(1);
  const at::Tensor rows = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  const bool narrow = x.scalar_type() == at::kFloat && !anchor.positions;
  cuda::addTokenRows(place, rows.mutable_data_ptr<float>(), narrow ? x.const_data_ptr<float>() : nullptr,
                     tokens.const_data_ptr<int64_t>(), static_cast<uint64_t>(x.size(0)), anchor.tokens, anchor.normal,
                     sign);
  if (narrow) return rows;
  at::Tensor sum = x.clone();
  if (anchor.positions) {
    const int64_t time = anchor.positions->size(0);
    sum.view({-1, time, width}).add_(anchor.positions->unsqueeze(0), sign);
  }
  return sum.add_(rows.to(x.scalar_type()));
}
#else
at::Tensor addAnchorOnDevice(const at::Tensor& x, const at::Tensor&, const SubspaceAnchor&, float) {
  throw ValueError("subspace: activations: expected them on the host, as this build has no CUDA kernels, got them on " +
                   x.device().str());
}
#endif

}  // namespace lowcomm
