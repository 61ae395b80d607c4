#include "backend/own_reduction.h"

#include <ATen/ATen.h>

#include "kernels/reduce.h"
#include "tensor/wire_type.h"

namespace lowcomm {

std::optional<double> premultiplyFactor(const c10d::ReduceOp& op) {
  // The name that 2.11 has and later versions keep.
  const auto* given = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM || !given) return std::nullopt;
  return given->tensor_factor.defined() ? given->tensor_factor.item<double>() : given->double_factor;
}

std::optional<Reduction> ownReduction(const c10d::ReduceOp& op, at::ScalarType type) {
  Reduction reduction;
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      break;
    case c10d::ReduceOp::AVG:
      reduction.average = true;
      break;
    case c10d::ReduceOp::PREMUL_SUM: {
      const std::optional<double> factor = premultiplyFactor(op);
      if (!factor || !at::isFloatingType(type)) return std::nullopt;
      reduction.premultiplied = true;
      reduction.premultiply = *factor;
      break;
    }
    case c10d::ReduceOp::PRODUCT:
      reduction.kind = ReduceKind::product;
      break;
    case c10d::ReduceOp::MIN:
      reduction.kind = ReduceKind::min;
      break;
    case c10d::ReduceOp::MAX:
      reduction.kind = ReduceKind::max;
      break;
    case c10d::ReduceOp::BAND:
      reduction.kind = ReduceKind::bit_and;
      break;
    case c10d::ReduceOp::BOR:
      reduction.kind = ReduceKind::bit_or;
      break;
    case c10d::ReduceOp::BXOR:
      reduction.kind = ReduceKind::bit_xor;
      break;
    default:
      return std::nullopt;
  }
  if (!reduceSupports(wireType(type), reduction.kind)) return std::nullopt;
  return reduction;
}

const char* reduceOpName(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "avg";
    case c10d::ReduceOp::PREMUL_SUM:
      return "premul_sum";
    case c10d::ReduceOp::PRODUCT:
      return reduceName(ReduceKind::product);
    case c10d::ReduceOp::MIN:
      return reduceName(ReduceKind::min);
    case c10d::ReduceOp::MAX:
      return reduceName(ReduceKind::max);
    case c10d::ReduceOp::BAND:
      return reduceName(ReduceKind::bit_and);
    case c10d::ReduceOp::BOR:
      return reduceName(ReduceKind::bit_or);
    case c10d::ReduceOp::BXOR:
      return reduceName(ReduceKind::bit_xor);
    default:
      return "another";
  }
}

}  // namespace lowcomm
