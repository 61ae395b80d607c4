#pragma once

#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace lowcomm {

// The factor of a PREMUL_SUM, by which every rank multiplies its contribution; nothing for other ops. Reads the tensor
// that holds it, so a device's is waited for.
std::optional<double> premultiplyFactor(const c10d::ReduceOp& op);

}  // namespace lowcomm
