#pragma once

#include <ATen/ATen.h>

#include "subspace/boundary.h"

namespace lowcomm {

// x + sign·(positions + T_fixed[tokens]) on a CUDA device, in a new tensor, on its current stream. `x` is [n, width]
// of fp32 or fp64, `tokens` int64 contiguous with n elements, both on one device. Throws ValueError where this build
// has no kernels for the device.
at::Tensor addAnchorOnDevice(const at::Tensor& x, const at::Tensor& tokens, const SubspaceAnchor& anchor, float sign);

}  // namespace lowcomm
