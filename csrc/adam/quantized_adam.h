#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "codec/spec.h"
#include "engine/op_queue.h"
#include "tensor/compression.h"

namespace lowcomm {

// The arithmetic of Adam's steps on spans of fp32, in the order of torch.optim.AdamW. Every operation is rounded by
// itself and in the order written, so that equal averages give equal parameters on every CPU; called under FloatEnv.

// Elements of one tensor. Those that a function does not name may be null.
struct AdamSpan {
  float* parameter;       // θ
  float* rounding;        // what writing θ in its own dtype took from it; null where that is fp32
  const float* gradient;  // g, the rank's own or the average
  float* momentum;        // m
  float* variance;        // v
  float* message;         // the rank's own part of the update, then the average
  size_t n;
};

// One parameter group's hyper-parameters.
struct AdamRule {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double weight_decay = 0;  // decoupled: θ ← θ − lr·weight_decay·θ
};

// The denominators √v̂ + eps, v̂ = max(v, least) / (1 − β2^updates).
struct AdamScale {
  int64_t updates;  // of v
  float least;
};

// Step t, counted from 1, with the averaged gradient: m ← β1·m + (1−β1)·g, v ← β2·v + (1−β2)·g², and
// θ ← θ − lr·weight_decay·θ − lr·m̂ / (√v̂ + eps) (Kingma and Ba, arXiv 1412.6980, Algorithm 1, with the weight decay
// of Loshchilov and Hutter, arXiv 1711.05101, Algorithm 2).
void stepAdam(const AdamSpan& s, const AdamRule& rule, int64_t t);

// The least v that a frozen denominator uses: (1−β2)·mean of v.
float leastVariance(const float* variance, size_t n, double beta2);

// message = (β1·m + (1−β1)·g) / (√v̂ + eps), of the rank's own gradient; m and v stay.
void formUpdate(const AdamSpan& s, const AdamRule& rule, const AdamScale& scale);

// Step t with the average of the messages, u: m ← u·(√v̂ + eps), θ ← θ − lr·weight_decay·θ − lr·u / (1 − β1^t).
void stepFrozen(const AdamSpan& s, const AdamRule& rule, const AdamScale& scale, int64_t t);

// How the ranks of a group train. Every rank has the same.
struct QuantizedAdamOptions {
  CodecSpec codec;             // of updates after the warm-up
  int64_t warmup_steps = 100;  // a parameter's first steps, whose gradients are averaged exactly
  int64_t check_every = 100;   // steps between comparisons of a checksum of parameters and moments; 0: none
  uint64_t seed = 0;           // of codecs that round at random

  // Throws ValueError naming the field, what is expected and what it is.
  void check() const;
};

// A parameter, under the name that errors have for it. Of any device and floating dtype.
struct AdamParameter {
  std::string name;
  at::Tensor tensor;
  size_t group;  // whose AdamRule it takes
};

// Adam whose ranks exchange few bits a parameter: QuantizedAdam of AQ-SGD (Wang et al., NeurIPS 2022, section 4.3),
// which is 1-bit Adam (Tang et al., arXiv 2102.02888, Algorithm 1) with other codecs. A rank's gradient is its own, of
// its own data:
//
//   warm-up:  g = the ranks' average, exact; AdamW's step
//   then:     m_i = β1·m + (1−β1)·g_i,  m = C(m_i + e_i) averaged,  θ ← θ − lr·m̂ / (√v̂ + eps),  v as it was
//
// C codes twice, and both losses return: what the shares of other ranks' slices lose to the rank that encoded them,
// what the second encoding of a slice's sum loses to the rank that owns the slice (collective/all_reduce.h).
//
// Two things differ from 1-bit Adam. A message holds m_i / (√v̂ + eps), which the ranks' common v allows: a step of the
// codec then weighs the same in each parameter, where in m it would be many times the step of those with a small v. And
// v̂ counts as (1−β2)·(the tensor's mean of v̂) where it is less: a parameter that the warm-up has not moved would
// otherwise be divided by eps for ever.
//
// Every element is coded after the warm-up, those of vectors too, in one message a step. An error, or a gradient that
// is not finite on any rank, changes no state on any rank. All ranks end a step with the same bits in parameters and
// moments. In host memory, 20 bytes a parameter: m, v, the message, the residual and its copy; of parameters that are
// not fp32 four more, of what rounding takes from them. One thread at a time.
class QuantizedAdam {
 public:
  // Throws ValueError for options that will not do.
  QuantizedAdam(std::shared_ptr<OpQueue> group, QuantizedAdamOptions options);

  // More parameters, which begin with a warm-up. Throws TypeError for a tensor that is not dense floating-point.
  void add(std::vector<AdamParameter> parameters);

  // Is given which parameter is not finite, and on which rank, or "", once a step has averaged and before it changes
  // anything. It returns the text that counts; what it throws drops the step, as an error of the average does.
  using Settle = std::function<std::string(const std::string& not_finite)>;

  // Takes a step with this rank's gradients, one per parameter; an undefined one counts as zeros. `rules`: one per
  // group; gradients are multiplied by `scale`; `settle` may be empty. Collective: at the first step, after add() and
  // load(), and every check_every steps the ranks compare options, rules, parameters and values, before anything else
  // is sent.
  //
  // Throws ValueError and TypeError for gradients that do not fit, ValueError naming the first parameter whose average
  // is not finite, PeerRefusal naming what differs on another rank, PeerError. With `skip` a step that is not finite
  // returns false instead of that error; it does so on all ranks that pass `skip`.
  bool step(const std::vector<at::Tensor>& gradients, const std::vector<AdamRule>& rules, float scale = 1,
            bool skip = false, const Settle& settle = {});

  // One a parameter: "step", steps so far, and "variance_step", those in which v changed, int64 scalars; "exp_avg",
  // "exp_avg_sq" and, of other types than fp32, "rounding", equal on all ranks; "residual", the rank's own. fp32, of
  // the parameter's shape: the optimizer's own memory, until the next step or load().
  using State = std::map<std::string, at::Tensor>;
  std::vector<State> state() const;

  // Takes what state() gave, whose run then goes on with the same bits. Throws ValueError naming what is missing or
  // does not fit; nothing has changed then.
  void load(const std::vector<State>& state);

  // The bytes that this rank moved in the last step.
  const OpCounters& moved() const { return moved_; }

 private:
  struct ParameterState {
    AdamParameter parameter;
    uint32_t number;
    int64_t steps = 0, variance_steps = 0;
    at::Tensor momentum, variance, rounding, message;
    std::shared_ptr<Compression> compression;
    float least = -1;  // of v̂'s denominators; below 0 where v has changed since

    bool frozen(const QuantizedAdamOptions& options) const { return steps >= options.warmup_steps; }
    AdamSpan span() const;
  };
  struct Message;

  void agree(const std::vector<AdamRule>& rules);
  std::shared_ptr<Message> form(const std::vector<at::Tensor>& gradients, const std::vector<AdamRule>& rules,
                                float scale);
  void average(const std::shared_ptr<Message>& message);
  std::string notFinite(const Message& message) const;
  void apply(const Message& message, const std::vector<AdamRule>& rules);
  AdamScale scaleOf(ParameterState& kept, const AdamRule& rule) const;
  std::string shapes() const;
  uint32_t checksum() const;

  const std::shared_ptr<OpQueue> group_;
  const QuantizedAdamOptions options_;
  std::vector<ParameterState> kept_;
  int64_t steps_ = 0;  // since the ranks have last compared
  bool agreed_ = false;
  OpCounters moved_;
};

}  // namespace lowcomm
