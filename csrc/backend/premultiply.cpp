#include "backend/premultiply.h"

#include <ATen/ATen.h>

namespace lowcomm {

std::optional<double> premultiplyFactor(const c10d::ReduceOp& op) {
  // The name that 2.11 has and later versions keep.
  const auto* given = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM || !given) return std::nullopt;
  return given->tensor_factor.defined() ? given->tensor_factor.item<double>() : given->double_factor;
}

}  // namespace lowcomm
