#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/noise/noise.h"

namespace lowcomm {

// ReplayWeights' loops where the weights lie on a CUDA device (cuda/noise.h), on its current stream.

// Throws ValueError where this build has no kernels for the tensor's device.
void expectDeviceNoise(const std::string& name, const at::Tensor& tensor);

// The terms of updates, for all parameters on all devices. A launch carries up to 64 terms by itself; a list that has
// an update with more is uploaded once a device, at the first such update there.
class DeviceTerms {
 public:
  // `terms` stay the caller's, for as long as this is used.
  explicit DeviceTerms(std::span<const NoiseTerm> terms) : terms_(terms) {}

  // w <- keep·w + sum of factor·z over `count` terms from number `begin` on, in place: the bits of the host's. `first`:
  // the element that w begins with; `stream`: of all the terms' keys, the parameter's number.
  void update(const at::Tensor& w, Noise noise, uint64_t first, float keep, uint32_t stream, size_t begin,
              size_t count);

 private:
  const NoiseTerm* on(c10::Device device);

  std::span<const NoiseTerm> terms_;
  std::vector<at::Tensor> uploaded_;  // as bytes, one a device
};

// out = w + factor·z; both contiguous, of one type.
void perturbOnDevice(const at::Tensor& out, const at::Tensor& w, Noise noise, uint64_t first, const NoiseTerm& term);

}  // namespace lowcomm
