#include "seed_replay/device_noise.h"

#include "base/error.h"

#if LOWCOMM_CUDA_KERNELS
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>

#include "cuda/accumulate.h"
#include "cuda/noise.h"
#include "tensor/device_queue.h"
#include "tensor/wire_type.h"
#endif

namespace lowcomm {

#if LOWCOMM_CUDA_KERNELS
namespace {

cuda::Place placeOf(const at::Tensor& tensor) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
  return {tensor.device().index(), static_cast<CUstream_st*>(handleOf(stream).value())};
}

}  // namespace

void expectDeviceNoise(const std::string& name, const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  if (!device.is_cuda() || !cuda::runsOn(device.index())) {
    throw ValueError("SeedReplay: parameter '" + name + "': expected one on the host or on a CUDA device that this " +
                     "build has kernels for, got one on " + device.str());
  }
}

const NoiseTerm* DeviceTerms::on(c10::Device device) {
  auto there =
      std::find_if(uploaded_.begin(), uploaded_.end(), [&](const at::Tensor& t) { return t.device() == device; });
  if (there == uploaded_.end()) {
    // The host waits for none of it: torch's allocators give neither memory away before the stream is past it.
    const at::Tensor listed =
        at::empty({static_cast<int64_t>(terms_.size_bytes())}, at::TensorOptions(at::kByte).pinned_memory(true));
    std::memcpy(listed.mutable_data_ptr(), terms_.data(), terms_.size_bytes());
    there = uploaded_.insert(there, listed.to(device, /*non_blocking=*/true));
  }
  return static_cast<const NoiseTerm*>(there->const_data_ptr());
}

void DeviceTerms::update(const at::Tensor& w, Noise noise, uint64_t first, float keep, uint32_t stream, size_t begin,
                         size_t count) {
  at::Tensor x = w.contiguous();
  if (keep != 1) {
    // Rounded once: a narrow type is widened for both.
    x = x.scalar_type() == at::kFloat ? x.mul_(keep) : x.to(at::kFloat).mul_(keep);
  }
  const cuda::Place place = placeOf(x);
  const DType dtype = wireType(x.scalar_type());
  const auto n = static_cast<uint64_t>(x.numel());
  void* const data = x.mutable_data_ptr();
  if (count > cuda::kCarriedTerms) {
    cuda::addNoise(place, noise, data, data, dtype, first, n, on(x.device()) + begin, count, stream);
  } else if (count > 0) {
    cuda::addNoise(place, noise, data, data, dtype, first, n, terms_.subspan(begin, count), stream);
  }
  if (!x.is_same(w)) w.copy_(x);
}

void perturbOnDevice(const at::Tensor& out, const at::Tensor& w, Noise noise, uint64_t first, const NoiseTerm& term) {
  cuda::addNoise(placeOf(out), noise, out.mutable_data_ptr(), w.const_data_ptr(), wireType(out.scalar_type()), first,
                 static_cast<uint64_t>(out.numel()), {&term, 1}, term.key.stream);
}
#else
void expectDeviceNoise(const std::string& name, const at::Tensor& tensor) {
  throw ValueError("SeedReplay: parameter '" + name + "': expected one on the host, as this build has no CUDA " +
                   "kernels, got one on " + tensor.device().str());
}

// expectDeviceNoise() has let no such tensor in.
void DeviceTerms::update(const at::Tensor&, Noise, uint64_t, float, uint32_t, size_t, size_t) {}
void perturbOnDevice(const at::Tensor&, const at::Tensor&, Noise, uint64_t, const NoiseTerm&) {}
#endif

}  // namespace lowcomm
