#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <span>
#include <string>

#include "kernels/noise.h"

namespace lowcomm {

// ReplayWeights' loops where the weights lie on a CUDA device (cuda/noise.h), on its current stream.

// Throws ValueError where this build has no kernels for the tensor's device.
void expectDeviceNoise(const std::string& name, const at::Tensor& tensor);

// w <- keep·w + sum of factor·z, in place: the bits of the host's. `first`: the element that w begins with.
void updateOnDevice(const at::Tensor& w, Noise noise, uint64_t first, float keep, std::span<const NoiseTerm> terms);

// out = w + factor·z; both contiguous, of one type.
void perturbOnDevice(const at::Tensor& out, const at::Tensor& w, Noise noise, uint64_t first, const NoiseTerm& term);

}  // namespace lowcomm
