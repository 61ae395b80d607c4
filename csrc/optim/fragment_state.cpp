// The parts of a fragment that another rank takes over, and those that a checkpoint holds.
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "optim/fragment.h"

namespace lowcomm {
namespace {

const std::string kOwn = "own.";

}  // namespace

std::vector<at::Tensor> Fragment::shared() {
  TORCH_INTERNAL_ASSERT(phase_ == Phase::idle);
  std::vector<at::Tensor> all;
  factors_.assign(kept_.size(), at::Tensor());
  for (size_t i = 0; i < kept_.size(); ++i) {
    ParameterState& kept = kept_[i];
    all.push_back(kept.outer);
    if (kept.momentum.defined()) all.push_back(kept.momentum);
    if (kept.first_rank == 0) continue;
    kept.compression->setRank(std::min(next_rank_, kept.first_rank));
    all.push_back(factors_[i] = kept.compression->factor().clone());
  }
  return all;
}

void Fragment::share(bool behind) {
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < kept_.size(); ++i) {
    ParameterState& kept = kept_[i];
    if (factors_[i].defined()) {
      const at::Tensor residual = kept.compression->residual();
      kept.compression->set(residual.defined() ? std::optional(residual) : std::nullopt, factors_[i]);
    }
    if (kept.own_momentum.defined()) kept.own_momentum.copy_(kept.momentum);
  }
  factors_.clear();
  if (behind) restore();
}

// f(key, tensor) of every tensor that a checkpoint holds in addition to those of Compression.
template <class K, class F>
void Fragment::eachTensor(K& kept, F&& f) {
  const std::string& name = kept.parameter.name;
  f(name + ".outer", kept.outer);
  f(name + ".momentum", kept.momentum);
  f(name + ".message", kept.message);
  f(kOwn + name + ".mark", kept.mark);
  f(kOwn + name + ".rounding", kept.rounding);
  f(kOwn + name + ".own_message", kept.own_message);
  f(kOwn + name + ".own_momentum", kept.own_momentum);
}

TensorMap Fragment::state() const {
  TORCH_INTERNAL_ASSERT(phase_ != Phase::flying);
  TensorMap state;
  for (const ParameterState& kept : kept_) {
    // The ranks that write a checkpoint have all come so far: the message will not be taken back.
    if (kept.compression && kept.compression->done()) kept.compression->commit();
    eachTensor(kept, [&](const std::string& key, const at::Tensor& tensor) {
      if (tensor.defined()) state[key] = tensor.clone();
    });
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
  for (const ParameterState& kept : kept_) {
    eachTensor(kept, [&](const std::string& key, const at::Tensor& tensor) {
      if (tensor.defined()) expect(key, tensor);
    });
    if (!kept.compression) continue;
    const std::string& name = kept.parameter.name;
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
  for (ParameterState& kept : kept_) {
    eachTensor(kept, [&](const std::string& key, at::Tensor& tensor) {
      if (tensor.defined()) tensor.copy_(state.at(key));
    });
    if (!kept.compression) continue;
    Compression& compression = *kept.compression;
    const std::string& name = kept.parameter.name;
    const auto factor = find(name + ".factor", compression.factor().defined());
    if (factor) compression.setRank(factor->size(0));
    compression.set(find(kOwn + name + ".residual", compression.residual().defined()), factor);
  }
  flight_.reset();
  phase_ = phase;
  effective_ = effective;
}

}  // namespace lowcomm
