#include "adam/subspace_adam.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "tensor/parallel.h"
#include "tensor/product.h"

namespace lowcomm {
namespace {

// Rows of a tile have about so many elements together: few, that a tile's gradient, moments and update stay in the
// cache, and enough for a fast product.
constexpr int64_t kTile = 128 * 1024, kMovedTile = 256 * 1024;
constexpr int64_t kSummed = 64 * 1024;  // elements of a sum of squares

// A bias is a matrix of one column.
at::Tensor matrixOf(const at::Tensor& t) {
  return t.dim() == 1 ? t.unsqueeze(1) : t;
}

int64_t tileRows(int64_t elements, int64_t columns) {
  return std::max<int64_t>(1, elements / std::max<int64_t>(1, columns));
}

// a·b. Rows of `a` that are 0 cost a look at them: the gradient of an embedding has others for the tokens of a batch
// alone. Their number changes from step to step, so that torch's BLAS, which compiles nothing, takes them.
at::Tensor productOfRows(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_cpu() || !a.is_contiguous() || a.numel() == 0) return product(a, b);
  const size_t bytes = a.size(1) * a.itemsize();
  const char* row = static_cast<const char*>(a.const_data_ptr());
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < a.size(0); ++i, row += bytes)
    if (*row != 0 || std::memcmp(row, row + 1, bytes - 1) != 0) rows.push_back(i);
  if (static_cast<int64_t>(rows.size()) > a.size(0) / 2) return product(a, b);
  at::Tensor all = at::zeros({a.size(0), b.size(1)}, b.options());
  const at::Tensor places = at::tensor(rows, at::kLong);
  return rows.empty() ? all : all.index_copy_(0, places, at::mm(a.index_select(0, places), b));
}

double correction(double beta, int64_t t) {
  return 1 - std::pow(beta, static_cast<double>(t));
}

// Sums of 16 strands, so that the order is the same with any number of threads and any instruction set.
template <typename T>
double squaresOf(const T* x, int64_t n) {
  double strands[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int s = 0; s < 16; ++s)
      strands[s] += static_cast<double>(x[i + s]) * static_cast<double>(x[i + s]);
  }
  for (; i < n; ++i)
    strands[i % 16] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  double sum = 0;
  for (const double strand : strands)
    sum += strand;
  return sum;
}

double squaresOf(const at::Tensor& given) {
  if (!given.device().is_cpu()) return given.to(at::kDouble).square().sum().item<double>();
  const at::Tensor x = (given.scalar_type() == at::kDouble ? given : given.to(at::kFloat)).contiguous();
  std::vector<double> blocks((x.numel() + kSummed - 1) / kSummed);
  inParallel(static_cast<int64_t>(blocks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t n = std::min(kSummed, x.numel() - block * kSummed);
      blocks[block] = x.scalar_type() == at::kDouble ? squaresOf(x.const_data_ptr<double>() + block * kSummed, n)
                                                     : squaresOf(x.const_data_ptr<float>() + block * kSummed, n);
    }
  });
  double sum = 0;
  for (const double block : blocks)
    sum += block;
  return sum;
}

}  // namespace

std::vector<at::Tensor> SubspaceAdam::project(const std::vector<at::Tensor>& gradients) {
  const c10::NoGradGuard no_grad;
  check("project", gradients);
  std::vector<at::Tensor> slices(kept_.size());
  for (size_t i = 0; i < kept_.size(); ++i) {
    Kept& kept = kept_[i];
    kept.coordinates.reset();
    if (kept.rule == SubspaceRule::plain || !gradients[i].defined()) continue;
    const at::ScalarType type = kept.vectors.scalar_type();
    kept.coordinates = kept.is_coordinates ? gradients[i].to(type, /*non_blocking=*/false, /*copy=*/true)
                                           : kept.coordinatesOf(gradients[i].to(type));
    if (kept.is_slice) slices[i] = kept.coordinates;
  }
  return slices;
}

std::vector<double> SubspaceAdam::squares(const std::vector<at::Tensor>& gradients) const {
  const c10::NoGradGuard no_grad;
  check("squares", gradients);
  std::vector<double> all;
  for (size_t i = 0; i < kept_.size(); ++i) {
    // U has orthonormal columns: the projected gradient's norm is that of its coordinates.
    const at::Tensor& x = kept_[i].rule == SubspaceRule::plain ? gradients[i] : kept_[i].coordinates;
    all.push_back(x.defined() ? squaresOf(x) : 0);
  }
  return all;
}

std::vector<at::Tensor> SubspaceAdam::form(const std::vector<at::Tensor>& parameters,
                                           const std::vector<at::Tensor>& gradients, const std::vector<AdamRule>& rules,
                                           double scale) {
  const c10::NoGradGuard no_grad;
  check("form", gradients);
  formPlain(parameters, gradients, rules, scale);
  std::vector<at::Tensor> slices(kept_.size());
  for (size_t i = 0; i < kept_.size(); ++i) {
    Kept& kept = kept_[i];
    if (!kept.coordinates.defined()) continue;
    kept.count();
    if (scale != 1) kept.coordinates.mul_(scale);
    const AdamRule& rule = rules.at(kept.group);
    kept.rule == SubspaceRule::rows ? formRows(kept, rule) : formProjected(kept, rule);
    if (kept.is_slice && kept.rule == SubspaceRule::projected)
      slices[i] = kept.coordinates;
    else
      kept.move(parameters[i], rule);
  }
  return slices;
}

void SubspaceAdam::apply(const std::vector<at::Tensor>& parameters, const std::vector<AdamRule>& rules) {
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < kept_.size(); ++i) {
    if (kept_[i].coordinates.defined()) kept_[i].move(parameters[i], rules.at(kept_[i].group));
  }
}

// One call of torch's fused AdamW for all parameters of a group, dtype and device.
void SubspaceAdam::formPlain(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& gradients,
                             const std::vector<AdamRule>& rules, double scale) {
  struct Lists {
    size_t group;
    std::vector<size_t> numbers;
    std::vector<at::Tensor> parameters, gradients, momenta, variances, steps;
  };
  std::map<std::string, Lists> calls;
  for (size_t i = 0; i < kept_.size(); ++i) {
    Kept& kept = kept_[i];
    if (kept.rule != SubspaceRule::plain || !gradients[i].defined()) continue;
    kept.count();
    const at::Tensor wide = kept.wide(parameters[i]);
    Lists& lists = calls[c10::str(kept.group, wide.scalar_type(), wide.device())];
    lists.group = kept.group;
    lists.numbers.push_back(i);
    lists.parameters.push_back(wide);
    lists.gradients.push_back(gradients[i].to(wide.scalar_type()).contiguous());
    lists.momenta.push_back(kept.momentum);
    lists.variances.push_back(kept.variance);
    lists.steps.push_back(kept.step);
  }
  for (const auto& [key, lists] : calls) {
    const AdamRule& rule = rules.at(lists.group);
    if (scale != 1) at::_foreach_mul_(lists.gradients, scale);
    at::_fused_adamw_(lists.parameters, lists.gradients, lists.momenta, lists.variances, {}, lists.steps, rule.lr,
                      rule.beta1, rule.beta2, rule.weight_decay, rule.eps, /*amsgrad=*/false, /*maximize=*/false);
    for (size_t at = 0; at < lists.numbers.size(); ++at)
      kept_[lists.numbers[at]].store(lists.parameters[at], parameters[lists.numbers[at]]);
  }
}

// The moments of the elements of U·C, and in C's place UᵀD. A step of fused AdamW from 0 with lr −1 is D.
void SubspaceAdam::formProjected(Kept& kept, const AdamRule& rule) {
  const int64_t rows = kept.whole[0], columns = kept.whole[1];
  const int64_t tile = kept.vectors.is_cpu() ? tileRows(kTile, columns) : std::max<int64_t>(1, rows);
  const at::Tensor momentum = matrixOf(kept.momentum), variance = matrixOf(kept.variance);
  const at::Tensor update = at::empty({std::min(tile, rows), columns}, kept.vectors.options());
  const at::Tensor of_update = at::zeros_like(kept.coordinates);
  for (int64_t first = 0; first < rows; first += tile) {
    const int64_t n = std::min(tile, rows - first);
    const at::Tensor u = kept.axis == 0 ? kept.vectors.narrow(1, first, n) : kept.vectors;
    const at::Tensor g =
        kept.axis == 0 ? product(u.t(), kept.coordinates) : productOfRows(kept.coordinates.narrow(0, first, n), u);
    at::Tensor d = update.narrow(0, 0, n);
    d.zero_();
    at::_fused_adamw_({d}, {g}, {momentum.narrow(0, first, n)}, {variance.narrow(0, first, n)}, {}, {kept.step},
                      /*lr=*/-1, rule.beta1, rule.beta2, /*weight_decay=*/0, rule.eps, false, false);
    if (kept.axis == 0) {
      of_update.add_(product(u, d));
    } else {
      of_update.narrow(0, first, n).copy_(product(d, u.t()));
    }
  }
  kept.coordinates = of_update;
}

// The moments of C, and in its place M̂ / (√v̂ + eps).
void SubspaceAdam::formRows(Kept& kept, const AdamRule& rule) {
  at::Tensor& c = kept.coordinates;
  kept.momentum.lerp_(c, 1 - rule.beta1);
  kept.variance.mul_(rule.beta2).add_(c.square_().sum(0), (1 - rule.beta2) / static_cast<double>(kept.width));
  const at::Tensor denominator =
      kept.variance.sqrt().div_(std::sqrt(correction(rule.beta2, kept.steps))).add_(rule.eps);
  at::div_out(c, kept.momentum, denominator.mul_(correction(rule.beta1, kept.steps)));
}

void SubspaceAdam::Kept::count() {
  ++steps;
  step.fill_(static_cast<double>(steps));
}

// The parameter as the arithmetic has it: its own memory, or a copy for store() to round back.
at::Tensor SubspaceAdam::Kept::wide(const at::Tensor& parameter) const {
  if (!rounding.defined()) return parameter.contiguous();
  return parameter.to(at::kFloat).contiguous().add_(rounding);
}

void SubspaceAdam::Kept::store(const at::Tensor& wide, const at::Tensor& parameter) {
  if (!wide.is_same(parameter)) parameter.copy_(wide);
  if (rounding.defined()) at::sub_out(rounding, wide, parameter.to(at::kFloat));
}

at::Tensor SubspaceAdam::Kept::coordinatesOf(const at::Tensor& given) const {
  const at::Tensor matrix = matrixOf(given);
  return axis == 0 ? product(vectors, matrix) : productOfRows(matrix, vectors.t());
}

// W ← (1 − lr·weight_decay)·W − lr·U·coordinates, or Z likewise; they are forgotten.
void SubspaceAdam::Kept::move(const at::Tensor& parameter, const AdamRule& rule) {
  const at::Tensor all = wide(parameter), w = matrixOf(all), c = std::move(coordinates);
  const double keep = 1 - rule.lr * rule.weight_decay;
  const int64_t rows = w.size(0), tile = w.is_cpu() ? tileRows(kMovedTile, w.size(1)) : std::max<int64_t>(1, rows);
  if (is_coordinates) all.mul_(keep).add_(c, -rule.lr);
  for (int64_t first = 0; first < rows && !is_coordinates; first += tile) {
    const int64_t n = std::min(tile, rows - first);
    const at::Tensor moved =
        axis == 0 ? product(vectors.narrow(1, first, n).t(), c) : product(c.narrow(0, first, n), vectors);
    w.narrow(0, first, n).mul_(keep).add_(moved, -rule.lr);
  }
  store(all, parameter);
}

}  // namespace lowcomm
