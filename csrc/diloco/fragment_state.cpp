// The parts of a fragment that another rank takes over, and those that a checkpoint holds.
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "base/float_env.h"
#include "diloco/fragment.h"

namespace lowcomm {
namespace {

const std::string kOwn = "own.";

}  // namespace

std::vector<at::Tensor> Fragment::shared() {
  TORCH_INTERNAL_ASSERT(phase_ == Phase::idle);
  std::vector<at::Tensor> all;
  factors_.assign(tensors_.size(), at::Tensor());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    OuterTensor& kept = tensors_[i];
    all.push_back(kept.outer);
    if (kept.momentum.defined()) all.push_back(kept.momentum);
    if (kept.first_rank == 0) continue;
    all.push_back(factors_[i] = kept.compression->factorOf(std::min(next_rank_, kept.first_rank)));
  }
  return all;
}

void Fragment::share(bool behind, const std::vector<at::Tensor>& trained) {
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    OuterTensor& kept = tensors_[i];
    if (factors_[i].defined()) {
      const at::Tensor residual = kept.compression->residual();
      kept.compression->setRank(factors_[i].size(0));
      kept.compression->set(residual.defined() ? std::optional(residual) : std::nullopt, factors_[i]);
    }
  }
  factors_.clear();
  if (behind) restore(trained);
}

// Where there is no message under way both have no meaning, and a place: checkpoints have one shape.
at::Tensor Fragment::averageOf(size_t i) const {
  at::Tensor average = at::zeros(tensors_[i].outer.sizes(), at::kFloat);
  auto* x = average.mutable_data_ptr<float>();
  if (phase_ == Phase::landed) {
    eachAveraged(i, [&](uint64_t first, uint64_t count, const float* from) { std::copy_n(from, count, x + first); });
  }
  return average;
}

at::Tensor Fragment::wholeMark(const OuterTensor& kept) const {
  at::Tensor mark = kept.outer.clone();
  auto* x = mark.mutable_data_ptr<float>();
  for (int64_t first = 0; phase_ == Phase::landed && first < mark.numel(); first += kOuterBlock) {
    const int64_t count = std::min(kOuterBlock, mark.numel() - first);
    float scratch[kOuterBlock];
    const float* from = kept.markOf(layout_, first, count, scratch);
    if (from != x + first) std::copy_n(from, count, x + first);
  }
  return mark;
}

TensorMap Fragment::state() const {
  TORCH_INTERNAL_ASSERT(phase_ != Phase::flying);
  const FloatEnv env;
  const bool marked = options_.mode != OuterMode::sync;
  TensorMap state;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const OuterTensor& kept = tensors_[i];
    // The ranks that write a checkpoint have all come so far: the message will not be taken back.
    if (kept.compression && kept.compression->done()) {
      isInResidual(i) ? leaveResidual(i) : kept.compression->commit();
    }
    kept.eachKept([&](const std::string& key, const at::Tensor& tensor) { state[key] = tensor.clone(); });
    state[kept.parameter.name + ".message"] = averageOf(i);
    if (marked) state[kOwn + kept.parameter.name + ".mark"] = wholeMark(kept);
    if (!kept.compression) continue;
    const at::Tensor residual = kept.compression->residual(), factor = kept.compression->factor();
    if (residual.defined()) state[kOwn + kept.parameter.name + ".residual"] = residual.clone();
    if (factor.defined()) state[kept.parameter.name + ".factor"] = factor.clone();
  }
  return state;
}

void Fragment::check(const TensorMap& state) const {
  const auto expect = [&](const std::string& key, const at::Tensor& like, bool any_rows = false) {
    const auto found = state.find(key);
    if (found == state.end()) throw ValueError("DiLoCoX: load: expected '" + key + "' in the state, got none");
    const at::Tensor& given = found->second;
    const bool fits = any_rows ? given.dim() == 2 && given.size(1) == like.size(1) : given.sizes() == like.sizes();
    if (!fits || given.scalar_type() != like.scalar_type()) {
      throw ValueError(c10::str("DiLoCoX: load: ", key, ": expected ", like.toString(), " of shape ", like.sizes(),
                                ", got ", given.toString(), " of shape ", given.sizes()));
    }
  };
  for (const OuterTensor& kept : tensors_) {
    kept.eachKept([&](const std::string& key, const at::Tensor& tensor) { expect(key, tensor); });
    const std::string& name = kept.parameter.name;
    expect(name + ".message", kept.outer);
    if (options_.mode != OuterMode::sync) expect(kOwn + name + ".mark", kept.outer);
    if (!kept.compression) continue;
    const at::Tensor residual = kept.compression->residual(), factor = kept.compression->factor();
    if (residual.defined()) expect(kOwn + name + ".residual", residual);
    if (factor.defined()) expect(name + ".factor", factor, /*any_rows=*/true);
  }
}

void Fragment::load(const TensorMap& state, Phase phase, const EffectiveRanks& effective) {
  const c10::NoGradGuard no_grad;
  const auto find = [&](const std::string& key, bool wanted) {
    return wanted ? std::optional(state.at(key)) : std::nullopt;
  };
  layout_ = {.exact = layout_.exact};
  for (OuterTensor& kept : tensors_) {
    kept.eachKept([&](const std::string& key, const at::Tensor& tensor) { tensor.copy_(state.at(key)); });
    const std::string& name = kept.parameter.name;
    if (phase == Phase::landed || layout_.exact) {
      if (!kept.message.defined()) kept.message = at::empty_like(kept.outer);
      kept.message.copy_(state.at(name + ".message"));
    }
    if (options_.mode != OuterMode::sync)
      (kept.rounding.defined() ? kept.mark : kept.start).copy_(state.at(kOwn + name + ".mark"));
    if (!kept.compression) continue;
    Compression& compression = *kept.compression;
    const auto factor = find(name + ".factor", compression.factor().defined());
    if (factor) compression.setRank(factor->size(0));
    compression.set(find(kOwn + name + ".residual", compression.residual().defined()), factor);
  }
  flight_.reset();
  phase_ = phase;
  last_.effective = effective;
}

}  // namespace lowcomm
