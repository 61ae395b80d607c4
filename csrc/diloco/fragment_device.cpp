// The passes of a fragment whose state is where its parameters are: torch's operations, each rounded by itself and in
// the order of the passes on the host (fragment_passes.cpp), so that both have the same bits.
#include <c10/core/GradMode.h>

#include <algorithm>

#include "base/float_env.h"
#include "diloco/fragment.h"

namespace lowcomm {
namespace {

int64_t rowsOf(const at::Tensor& t) {
  return t.dim() == 0 ? 1 : t.size(0);
}

// Elements of a part: a pass holds some copies of one part at a time.
int64_t partOf(const at::Tensor& t) {
  return std::min(rowsOf(t), std::max<int64_t>(1, kMostElements / (t.numel() / rowsOf(t))));
}

// Nesterov's step, as stepOuter() of spans.
void stepOuter(const OuterRows& r, const OuterRule& rule) {
  at::Tensor step = r.message;
  if (r.momentum.defined()) {
    r.momentum.mul_(rule.momentum).add_(r.message);
    step = r.momentum.mul(rule.momentum).add_(r.message);
  }
  r.outer.sub_(step.mul(rule.lr));
}

void moveParameter(const OuterRows& r, const at::Tensor& mark, const OuterRule& rule, Move move) {
  if (mark.defined()) {
    r.parameter.sub_(mark).add_(r.outer);
  } else if (move == Move::by_mode && rule.alpha > 0) {
    r.parameter.mul_(rule.alpha).add_(r.outer.mul(1 - rule.alpha));
  } else {
    r.parameter.copy_(r.outer);
  }
}

}  // namespace

// f(rows) of every tensor, some rows at a time; the parameter takes what f writes to it in fp32. `moves`: whether f
// does. `copies`: how many of a part, in fp32, there are at once at most. Throws c10::OutOfMemoryError, and no tensor
// has changed.
template <class F>
void Fragment::passOnDevice(int copies, bool moves, F&& f) {
  const c10::NoGradGuard no_grad;
  const FloatEnv env;
  // Memory that is too little shows here, before anything is written: torch's allocator keeps these for what the pass
  // takes further on, on the same stream. The last one is room for single values.
  std::vector<at::Tensor> taken;
  int64_t most = 0;
  for (const ParameterState& kept : kept_)
    most = std::max(most, partOf(kept.outer) * (kept.outer.numel() / rowsOf(kept.outer)));
  for (int i = 0; i <= copies && most > 0; ++i)
    taken.push_back(at::empty({i < copies ? most : 1024}, kept_[0].outer.options()));
  taken.clear();
  for (ParameterState& kept : kept_) {
    const at::Tensor whole = kept.parameter.tensor.detach();
    const int64_t rows = rowsOf(whole), step = partOf(whole);
    for (int64_t first = 0; first < rows; first += step) {
      const auto part = [&](const at::Tensor& t) {
        return !t.defined() || t.dim() == 0 ? t : t.narrow(0, first, std::min(step, rows - first));
      };
      const at::Tensor parameter = part(whole);
      const OuterRows r{parameter.to(at::kFloat), part(kept.outer),   part(kept.momentum), part(kept.start),
                        part(kept.mark),          part(kept.message), part(kept.rounding)};
      f(r);
      if (!r.rounding.defined()) continue;
      parameter.copy_(r.parameter);
      if (moves) r.rounding.copy_(parameter.to(at::kFloat).sub_(r.parameter));
      if (r.mark.defined()) r.mark.copy_(parameter);
    }
  }
}

// fp32, of its own where θ̄ is the mark.
at::Tensor Fragment::markOf(const OuterRows& r) const {
  if (r.rounding.defined()) return r.mark.to(at::kFloat);
  return mark_is_outer_ ? r.outer.clone() : r.start;
}

void Fragment::seeFinite(const at::Tensor& x) {
  const at::Tensor all = x.isfinite().all();
  device_finite_ = device_finite_.defined() ? device_finite_.logical_and(all) : all;
}

void Fragment::sendOnDevice(OpQueue& queue, uint32_t step, bool marks, double weight) {
  mark_is_outer_ = false;
  device_finite_ = at::Tensor();
  for (ParameterState& kept : kept_) {
    if (!kept.message.defined()) kept.message = at::empty_like(kept.outer);
  }
  passOnDevice(/*copies=*/3, /*moves=*/false, [&](const OuterRows& r) {
    r.message.copy_(r.outer.sub(r.parameter));
    seeFinite(r.message);
    if (r.rounding.defined()) r.message.add_(r.rounding);
    if (marks && r.start.defined()) r.start.copy_(r.parameter);
  });
  this->queue(queue, step, weight, {});
}

void Fragment::applyOnDevice(Move move) {
  const OuterRule rule = this->rule();
  const bool by_mark = move == Move::keeping || (move == Move::by_mode && rule.mode == OuterMode::proceed);
  passOnDevice(/*copies=*/4, /*moves=*/true, [&](const OuterRows& r) {
    const at::Tensor mark = by_mark ? markOf(r) : at::Tensor();
    stepOuter(r, rule);
    moveParameter(r, mark, rule, move);
  });
}

void Fragment::applyAndSendOnDevice(OpQueue& queue, uint32_t step, double weight) {
  const OuterRule rule = this->rule();
  device_finite_ = at::Tensor();
  passOnDevice(/*copies=*/5, /*moves=*/true, [&](const OuterRows& r) {
    const at::Tensor mark = markOf(r), own = mark.sub(r.parameter);
    seeFinite(own);
    stepOuter(r, rule);
    moveParameter(r, rule.mode == OuterMode::proceed ? mark : at::Tensor(), rule, Move::by_mode);
    r.message.copy_(own);
    if (r.start.defined()) r.start.copy_(r.parameter);
  });
  for (size_t i = 0; i < kept_.size(); ++i)
    commit(i);
  mark_is_outer_ = false;
  this->queue(queue, step, weight, {});
}

void Fragment::restoreOnDevice() {
  passOnDevice(/*copies=*/2, /*moves=*/true, [&](const OuterRows& r) { r.parameter.copy_(r.outer); });
  mark_is_outer_ = true;
}

}  // namespace lowcomm
