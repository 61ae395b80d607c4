#include "optim/device_noise.h"

#include "codec/error.h"

#if LOWCOMM_CUDA_KERNELS
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>

#include "cuda/accumulate.h"
#include "cuda/noise.h"
#include "state/stream_handle.h"
#include "state/wire_type.h"
#endif

namespace lowcomm {

#if LOWCOMM_CUDA_KERNELS
namespace {

cuda::Place placeOf(const at::Tensor& tensor) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
  return {tensor.device().index(), static_cast<CUstream_st*>(handleOf(stream).value())};
}

void addOnDevice(const at::Tensor& out, const at::Tensor& x, Noise noise, uint64_t first,
                 std::span<const NoiseTerm> terms) {
  const cuda::Place place = placeOf(out);
  const DType dtype = wireType(out.scalar_type());
  const auto count = static_cast<uint64_t>(out.numel());
  if (terms.size() <= cuda::kCarriedTerms) {
    cuda::addNoise(place, noise, out.mutable_data_ptr(), x.const_data_ptr(), dtype, first, count, terms);
    return;
  }
  // The host waits for none of it: torch's allocators give neither memory away before the stream is past it.
  const at::Tensor listed =
      at::empty({static_cast<int64_t>(terms.size_bytes())}, at::TensorOptions(at::kByte).pinned_memory(true));
  std::memcpy(listed.mutable_data_ptr(), terms.data(), terms.size_bytes());
  const at::Tensor there = listed.to(out.device(), /*non_blocking=*/true);
  cuda::addNoise(place, noise, out.mutable_data_ptr(), x.const_data_ptr(), dtype, first, count,
                 static_cast<const NoiseTerm*>(there.const_data_ptr()), terms.size());
}

}  // namespace

void expectDeviceNoise(const std::string& name, const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  if (!device.is_cuda() || !cuda::runsOn(device.index())) {
    throw ValueError("seed replay: parameter '" + name + "': expected one on the host or on a CUDA device that this " +
                     "build has kernels for, got one on " + device.str());
  }
}

void updateOnDevice(const at::Tensor& w, Noise noise, uint64_t first, float keep, std::span<const NoiseTerm> terms) {
  at::Tensor x = w.contiguous();
  if (keep != 1) {
    // Rounded once: a narrow type is widened for both.
    x = x.scalar_type() == at::kFloat ? x.mul_(keep) : x.to(at::kFloat).mul_(keep);
  }
  if (!terms.empty()) addOnDevice(x, x, noise, first, terms);
  if (!x.is_same(w)) w.copy_(x);
}

void perturbOnDevice(const at::Tensor& out, const at::Tensor& w, Noise noise, uint64_t first, const NoiseTerm& term) {
  addOnDevice(out, w, noise, first, {&term, 1});
}
#else
void expectDeviceNoise(const std::string& name, const at::Tensor& tensor) {
  throw ValueError("seed replay: parameter '" + name + "': expected one on the host, as this build has no CUDA " +
                   "kernels, got one on " + tensor.device().str());
}

// expectDeviceNoise() has let no such tensor in.
void updateOnDevice(const at::Tensor&, Noise, uint64_t, float, std::span<const NoiseTerm>) {}
void perturbOnDevice(const at::Tensor&, const at::Tensor&, Noise, uint64_t, const NoiseTerm&) {}
#endif

}  // namespace lowcomm
