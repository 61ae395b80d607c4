#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "collective/reduction.h"

namespace lowcomm {

// What the exchange can reduce by itself; nothing for the rest, which is the inner backend's.
std::optional<Reduction> ownReduction(const c10d::ReduceOp& op, at::ScalarType type);

// As a description names it: "sum", "avg", "premul_sum", "band", ...
const char* reduceOpName(const c10d::ReduceOp& op);

}  // namespace lowcomm
