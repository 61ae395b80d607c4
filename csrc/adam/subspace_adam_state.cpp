#include <c10/core/GradMode.h>

#include "adam/subspace_adam.h"
#include "base/error.h"

// The state of SubspaceAdam: its parameters, their U, and what a checkpoint holds.

namespace lowcomm {
namespace {

constexpr const char* kOptimizer = "SubspaceAdamW: ";

// Zeros that begin `bytes` behind the beginning of their memory, where they are many. Large tensors all begin at the
// same place of a page; a pass over parameter, gradient and moments is then half as fast, for the processor takes a
// load for one that waits for a store to the same place of another page.
at::Tensor zerosBehind(int64_t bytes, const std::vector<int64_t>& shape, const at::TensorOptions& options) {
  constexpr int64_t kMany = 64 * 1024;
  const int64_t elements = c10::multiply_integers(shape);
  if (elements < kMany) return at::zeros(shape, options);
  const auto skip = bytes / static_cast<int64_t>(options.dtype().itemsize());
  return at::zeros({skip + elements}, options).narrow(0, skip, elements).view(shape);
}

at::ScalarType arithmeticOf(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void expectVectors(const SubspaceParameter& p) {
  const bool is_bias = p.tensor.dim() == 1 && p.axis == 0 && p.rule == SubspaceRule::projected && !p.is_coordinates;
  if (p.tensor.dim() != 2 && !is_bias) {
    throw ValueError(c10::str(kOptimizer, p.name, ": expected a matrix in S, or a bias, got shape ", p.tensor.sizes()));
  }
  if (p.axis != 0 && (p.axis != 1 || p.rule == SubspaceRule::rows))
    throw ValueError(c10::str(kOptimizer, p.name, ": axis: expected 0, or 1 of an embedding, got ", p.axis));
  const at::Tensor& u = p.vectors;
  const int64_t along = p.tensor.size(p.axis), columns = p.is_coordinates ? p.width : along;
  if (!u.defined() || u.dim() != 2 || u.size(1) != columns || u.size(0) < 1 || u.size(0) > p.width) {
    throw ValueError(c10::str(kOptimizer, p.name, ": vectors: expected shape [1 to ", p.width, ", ", columns, "], got ",
                              u.defined() ? c10::str(u.sizes()) : std::string("none")));
  }
  if (p.is_coordinates && (along != u.size(0) || p.is_slice)) {
    throw ValueError(c10::str(kOptimizer, p.name, ": expected all ", u.size(0), " coordinates in dimension ", p.axis,
                              ", got ", p.is_slice ? "a slice of " : "", along));
  }
}

}  // namespace

void SubspaceAdam::add(std::vector<SubspaceParameter> parameters) {
  for (const SubspaceParameter& p : parameters) {
    if (!p.tensor.is_floating_point() || p.tensor.layout() != at::kStrided) {
      throw TypeError(
          c10::str(kOptimizer, p.name, ": expected a dense floating-point tensor, got ", p.tensor.toString()));
    }
    if (p.rule != SubspaceRule::plain) expectVectors(p);
  }
  for (SubspaceParameter& p : parameters) {
    const at::TensorOptions options = p.tensor.options().dtype(arithmeticOf(p.tensor)).requires_grad(false);
    const std::vector<int64_t> shape = p.tensor.sizes().vec();
    Kept kept{std::move(p.name), p.rule, p.group, p.axis, p.width, p.is_slice, p.is_coordinates, shape, shape};
    if (p.rule != SubspaceRule::plain) kept.vectors = p.vectors.to(options).contiguous();
    if (p.is_coordinates) kept.whole[p.axis] = p.width;
    if (p.rule != SubspaceRule::plain && shape.size() == 1) kept.whole.push_back(1);
    const bool rows = p.rule == SubspaceRule::rows;
    const std::vector<int64_t>& elements = p.is_coordinates ? kept.whole : shape;
    kept.momentum = zerosBehind(1024, rows ? std::vector<int64_t>{p.vectors.size(0), shape[1]} : elements, options);
    kept.variance = zerosBehind(2048, rows ? std::vector<int64_t>{shape[1]} : elements, options);
    if (arithmeticOf(p.tensor) != p.tensor.scalar_type()) kept.rounding = at::zeros(kept.shape, options);
    kept.step = at::zeros({}, options.dtype(at::kFloat));
    kept_.push_back(std::move(kept));
  }
}

void SubspaceAdam::check(const char* call, const std::vector<at::Tensor>& gradients) const {
  if (gradients.size() != kept_.size()) {
    throw ValueError(c10::str(kOptimizer, call, ": expected a gradient, or none, for each of ", kept_.size(),
                              " parameters, got ", gradients.size()));
  }
  for (size_t i = 0; i < kept_.size(); ++i) {
    const at::Tensor& g = gradients[i];
    if (!g.defined()) continue;
    if (g.layout() != at::kStrided || !g.is_floating_point()) {
      throw TypeError(c10::str(kOptimizer, call, ": ", kept_[i].name,
                               ": expected a dense floating-point gradient, got ", g.toString()));
    }
    if (g.sizes() != kept_[i].shape) {
      throw ValueError(c10::str(kOptimizer, call, ": ", kept_[i].name, ": expected a gradient of shape ",
                                at::IntArrayRef(kept_[i].shape), ", got ", g.sizes()));
    }
  }
}

std::vector<SubspaceAdam::State> SubspaceAdam::state() const {
  std::vector<State> all;
  for (const Kept& kept : kept_) {
    State& state = all.emplace_back();
    state["step"] = kept.step;
    state["exp_avg"] = kept.momentum;
    state["exp_avg_sq"] = kept.variance;
    if (kept.rounding.defined()) state["rounding"] = kept.rounding;
  }
  return all;
}

void SubspaceAdam::load(const std::vector<State>& given) {
  const c10::NoGradGuard no_grad;
  const std::vector<State> own = state();
  if (given.size() != own.size()) {
    throw ValueError(
        c10::str(kOptimizer, "load: expected the state of ", own.size(), " parameters, got ", given.size()));
  }
  for (size_t i = 0; i < own.size(); ++i) {
    for (const auto& [key, like] : own[i]) {
      const std::string& name = kept_[i].name;
      const auto found = given[i].find(key);
      if (found == given[i].end())
        throw ValueError(c10::str(kOptimizer, "load: ", name, ": expected '", key, "' in the state, got none"));
      if (found->second.sizes() != like.sizes()) {
        throw ValueError(c10::str(kOptimizer, "load: ", name, ": ", key, ": expected shape ", like.sizes(), ", got ",
                                  found->second.sizes()));
      }
    }
  }
  for (size_t i = 0; i < own.size(); ++i) {
    kept_[i].coordinates.reset();
    for (const auto& [key, tensor] : own[i])
      tensor.copy_(given[i].at(key));
    kept_[i].steps = static_cast<int64_t>(kept_[i].step.item<double>());
  }
}

}  // namespace lowcomm
