#include "backend/reduction.h"

#include "kernels/reduce.h"
#include "tensor/wire_type.h"

namespace lowcomm {
namespace {

// The arithmetic of a reduction; sum for AVG and PREMUL_SUM, whose factors ownReduction() adds.
std::optional<ReduceKind> kindOf(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG:
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceKind::sum;
    case c10d::ReduceOp::PRODUCT:
      return ReduceKind::product;
    case c10d::ReduceOp::MIN:
      return ReduceKind::min;
    case c10d::ReduceOp::MAX:
      return ReduceKind::max;
    case c10d::ReduceOp::BAND:
      return ReduceKind::bit_and;
    case c10d::ReduceOp::BOR:
      return ReduceKind::bit_or;
    case c10d::ReduceOp::BXOR:
      return ReduceKind::bit_xor;
    default:
      return std::nullopt;
  }
}

}  // namespace

std::optional<double> premultiplyFactor(const c10d::ReduceOp& op) {
  // The name that 2.11 has and later versions keep.
  const auto* given = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM || !given) return std::nullopt;
  return given->tensor_factor.defined() ? given->tensor_factor.item<double>() : given->double_factor;
}

Tensors asReal(const Tensors& tensors, const c10d::ReduceOp& op) {
  const bool sums =
      op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG || op.op_ == c10d::ReduceOp::PREMUL_SUM;
  Tensors real;
  for (const auto& tensor : tensors) {
    const bool seen = sums && tensor.is_complex() && tensor.layout() == at::kStrided && !tensor.is_conj();
    real.push_back(seen ? at::view_as_real(tensor) : tensor);
  }
  return real;
}

std::optional<Reduction> ownReduction(const c10d::ReduceOp& op, at::ScalarType type) {
  const std::optional<ReduceKind> kind = kindOf(op);
  if (!kind || !reduceSupports(wireType(type), *kind)) return std::nullopt;
  Reduction reduction;
  reduction.kind = *kind;
  reduction.average = op.op_ == c10d::ReduceOp::AVG;
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    const std::optional<double> factor = premultiplyFactor(op);
    if (!factor || !at::isFloatingType(type)) return std::nullopt;
    reduction.premultiplied = true;
    reduction.premultiply = *factor;
  }
  return reduction;
}

const char* reduceOpName(const c10d::ReduceOp& op) {
  if (op.op_ == c10d::ReduceOp::AVG) return "avg";
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) return "premul_sum";
  const std::optional<ReduceKind> kind = kindOf(op);
  return kind ? reduceName(*kind) : "another";
}

}  // namespace lowcomm
