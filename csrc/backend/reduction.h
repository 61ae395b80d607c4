#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <optional>

#include "backend/work.h"
#include "collective/summer.h"

namespace lowcomm {

// The reduction that the exchange does by itself; nothing for the rest.
std::optional<Reduction> ownReduction(const c10d::ReduceOp& op, at::ScalarType type);

// Complex tensors as twice as many real numbers, where the reduction does the same to both parts (sums); others as they
// are.
Tensors asReal(const Tensors& tensors, const c10d::ReduceOp& op);

// The factor of a PREMUL_SUM, by which every rank multiplies its contribution; nothing for other ops. Reads the tensor
// that holds it, so a device's is waited for.
std::optional<double> premultiplyFactor(const c10d::ReduceOp& op);

// As a description names it: "sum", "avg", "premul_sum", "band", ...
const char* reduceOpName(const c10d::ReduceOp& op);

}  // namespace lowcomm
