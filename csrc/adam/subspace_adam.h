#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "adam/quantized_adam.h"

namespace lowcomm {

// How AdamW treats a parameter.
enum class SubspaceRule {
  plain,      // torch's AdamW
  projected,  // the gradient is projected onto S, AdamW's update too
  rows,       // the gradient is projected, the moments are of its coordinates: one second moment a hidden unit
};

// A parameter, or this process's part of one that is sharded. A constrained weight is a matrix whose columns (axis 0)
// or rows (axis 1) lie in S = col(U), where U has d rows and k orthonormal columns; or a bias, one such column, which
// is `projected`.
struct SubspaceParameter {
  std::string name;   // for errors
  at::Tensor tensor;  // of floating dtype, on any device; steps take it again
  size_t group = 0;   // whose AdamRule it takes
  SubspaceRule rule = SubspaceRule::plain;
  int64_t axis = 0;             // along which S acts; 0 for `rows`
  at::Tensor vectors;           // Uᵀ, [k, the part's size along `axis`]; undefined: plain
  int64_t width = 0;            // d
  bool is_slice = false;        // the part is a slice along `axis`: sums over it need the other parts'
  bool is_coordinates = false;  // the tensor is not W but its coordinates, W = U·Z (or Z·Uᵀ): `vectors` [k, d]
};

// AdamW that keeps weights in a subspace S (Protocol Models, section 5, equations 12 to 14).
// With G the gradient of a weight whose columns lie in S, and C = UᵀG [k, n]:
//
//   plain:      torch's fused AdamW
//   projected:  P = U·C; m, v and D = m̂ / (√v̂ + eps) elementwise of P; W ← (1 − lr·weight_decay)·W − lr·U·(UᵀD)
//   rows:       M ← β1·M + (1−β1)·C [k, n]; v ← β2·v + (1−β2)·Σ_i C_ij² / d [n];
//               W ← (1 − lr·weight_decay)·W − lr·U·(M̂ / (√v̂ + eps))
//
// `rows` divides a column by one number, so its update lies in S and W stays there without being projected. Where the
// rows lie in S (axis 1, an embedding), everything is transposed. Of a weight whose coordinates Z = UᵀW are the
// parameter, C is the gradient as it is, and Z takes the same steps without U: training is the same to rounding, and
// costs `projected` two matrix products of the four, `rows` none of the two. Rows of an embedding's gradient that are 0
// cost none of the first two.
//
// A step is four calls, because sums over the parts of a sharded weight are the caller's, who has the process group:
// project(), squares() (only to clip), form(), apply(). Arithmetic and moments have the parameter's dtype, or fp32
// where that is narrower; then 4 bytes an element keep what rounding takes from the parameter. Moments of `rows` take
// k/d of the others' memory. Tensors are on the parameter's device; host and CUDA run the same operations of torch.
// One thread at a time.
class SubspaceAdam {
 public:
  // More parameters. Throws TypeError for a tensor that is not dense floating-point, ValueError for vectors that do not
  // fit; nothing was added then.
  void add(std::vector<SubspaceParameter> parameters);

  // 1. Coordinates C of all constrained gradients, kept for the step. `gradients`: one per parameter; may be undefined.
  // Returns, for each parameter, the tensor that has to be summed over its slices, in place; undefined if there is
  // nothing to sum. Throws TypeError and ValueError for gradients that do not fit.
  std::vector<at::Tensor> project(const std::vector<at::Tensor>& gradients);

  // 2. The sum of squares of each projected gradient, in fp64 and in a fixed order; 0 for an undefined one. A slice of
  // a constrained weight returns the sum of the whole.
  std::vector<double> squares(const std::vector<at::Tensor>& gradients) const;

  // 3. A step with the gradients that project() had, times `scale`: multiplies plain gradients in place, moves all
  // moments, and all weights but those that are returned: the coordinates UᵀD of slices, to be summed over them in
  // place. Parameters without a gradient stay as they are, and their step does not count.
  std::vector<at::Tensor> form(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& gradients,
                               const std::vector<AdamRule>& rules, double scale = 1);

  // 4. Moves the weights whose coordinates form() returned. Ends the step: what project() kept is forgotten.
  void apply(const std::vector<at::Tensor>& parameters, const std::vector<AdamRule>& rules);

  // One a parameter: "step", an fp32 scalar as torch's; "exp_avg", "exp_avg_sq" and, of narrow types, "rounding". The
  // optimizer's own memory.
  using State = std::map<std::string, at::Tensor>;
  std::vector<State> state() const;

  // Copies what state() gave. Throws ValueError naming what is missing or does not fit; nothing has changed then.
  void load(const std::vector<State>& state);

 private:
  struct Kept {
    std::string name;
    SubspaceRule rule;
    size_t group;
    int64_t axis, width;
    bool is_slice, is_coordinates;
    std::vector<int64_t> shape, whole;  // of the parameter; of W
    at::Tensor vectors;                 // as the arithmetic has them
    at::Tensor step, momentum, variance, rounding;
    int64_t steps = 0;
    at::Tensor coordinates;  // of the gradient, then of the update

    void count();
    at::Tensor wide(const at::Tensor& parameter) const;
    void store(const at::Tensor& wide, const at::Tensor& parameter);
    at::Tensor coordinatesOf(const at::Tensor& given) const;
    void move(const at::Tensor& parameter, const AdamRule& rule);
  };

  void formPlain(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& gradients,
                 const std::vector<AdamRule>& rules, double scale);
  void formProjected(Kept& kept, const AdamRule& rule);
  void formRows(Kept& kept, const AdamRule& rule);
  void check(const char* call, const std::vector<at::Tensor>& gradients) const;

  std::vector<Kept> kept_;
};

}  // namespace lowcomm
