// The passes of a fragment over its parameters, and what they make of start, mark and average.
#include <c10/core/GradMode.h>

#include <algorithm>

#include "base/float_env.h"
#include "diloco/fragment.h"
#include "kernels/finite.h"
#include "tensor/host_parameters.h"

namespace lowcomm {
namespace {

// f(first, count) of elements that stay in the first cache.
template <class F>
void eachBlock(int64_t elements, F&& f) {
  for (int64_t first = 0; first < elements; first += kOuterBlock)
    f(first, std::min<int64_t>(kOuterBlock, elements - first));
}

// stepAndRestart in mode continue where the mark is θ̄ − start, with the new δ for the start: its operations on each
// element in one loop, which reads all arrays from memory side by side. kSwaps: the new start takes the average's
// place, and the old one stays. Not inlined: FloatEnv.
template <bool kMomentum, bool kSwaps>
__attribute__((noinline)) bool stepAndContinue(const OuterSpan& s, const OuterRule& rule, float* start_at) {
  float* __restrict parameter = s.parameter, * __restrict outer = s.outer, * __restrict momentum = s.momentum;
  float* __restrict start = start_at, * __restrict average = s.message;
  const float lr = rule.lr, mu = rule.momentum;
  int32_t room = 0;
  for (size_t i = 0; i < s.n; ++i) {
    const float mark = outer[i] - start[i], own = mark - parameter[i];
    room |= finiteRoom(own);
    float step = average[i];
    if constexpr (kMomentum) {
      const float u = mu * momentum[i] + average[i];
      momentum[i] = u;
      step += mu * u;
    }
    const float moved = outer[i] - lr * step;
    outer[i] = moved;
    parameter[i] = moved + (parameter[i] - mark);
    (kSwaps ? average : start)[i] = own;
  }
  return room >= 0;
}

template <bool kMomentum>
bool stepAndContinue(const OuterSpan& s, const OuterRule& rule, float* start, bool swaps) {
  return swaps ? stepAndContinue<kMomentum, true>(s, rule, start) : stepAndContinue<kMomentum, false>(s, rule, start);
}

}  // namespace

OuterRule Fragment::rule() const {
  return {options_.mode, static_cast<float>(options_.lr), static_cast<float>(options_.momentum),
          static_cast<float>(options_.alpha)};
}

// f(kept, host) of every tensor: its state and its parameter, fp32 in host memory, which takes what f writes there.
// `moves`: whether f writes there.
template <class F>
void Fragment::pass(bool moves, F&& f) {
  const c10::NoGradGuard no_grad;
  const FloatEnv env;
  std::vector<at::Tensor> parameters;
  for (const OuterTensor& kept : tensors_)
    parameters.push_back(kept.parameter.tensor);
  HostParameters hosts(std::move(parameters));
  for (size_t i = 0; i < tensors_.size(); ++i) {
    OuterTensor& kept = tensors_[i];
    const at::Tensor host = hosts.wide(i);
    f(i, host);
    if (moves) hosts.round(i, host);
    if (!kept.rounding.defined()) continue;
    // Training starts from what was written: what rounding added is no training.
    if (moves) kept.rounding.copy_(hosts.wide(i).sub_(host));
    if (kept.mark.defined()) kept.mark.copy_(hosts.host(i));
  }
  if (moves) hosts.store();
}

void Fragment::send(OpQueue& queue, uint32_t step, bool marks, double weight) {
  TORCH_INTERNAL_ASSERT(phase_ == Phase::idle);
  ranks_ = queue.size();
  finite_ = true;
  layout_.in_place = layout_.exact || ranks_ == 1;
  layout_.start_is_delta = !marks && !layout_.exact;
  layout_.mark_is_outer = layout_.mark_is_apart = false;
  std::vector<at::Tensor> parameters;
  pass(/*moves=*/false, [&](size_t i, const at::Tensor& host) {
    OuterTensor& kept = tensors_[i];
    if (layout_.in_place && !kept.message.defined()) kept.message = at::empty_like(kept.outer);
    const bool delta = kept.start.defined() && kept.holdsDelta(layout_);
    eachBlock(host.numel(), [&](int64_t first, int64_t count) {
      float scratch[kOuterBlock];
      OuterSpan s = kept.span(host, first, count);
      s.message = layout_.in_place ? dataAt(kept.message, first) : delta ? dataAt(kept.start, first) : scratch;
      finite_ &= takeFromOuter(s);
      if (marks && kept.start.defined() && !delta) copyElements(dataAt(kept.start, first), s.parameter, count);
    });
    parameters.push_back(host);
  });
  this->queue(queue, step, weight, parameters);
}

// f(first, count, Δ) of a tensor, of the average that has landed.
void Fragment::eachAveraged(size_t i, const TakeElements& take) const {
  const auto blocks = [&](uint64_t first, uint64_t count, float* x) {
    eachBlock(static_cast<int64_t>(count), [&](int64_t more, int64_t n) { take(first + more, n, x + more); });
  };
  if (layout_.in_place) {
    blocks(0, static_cast<uint64_t>(tensors_[i].outer.numel()), dataAt(tensors_[i].message, 0));
  } else {
    flight_->average.decode(i, blocks);
  }
}

// The average that has landed stands in the place of the residual to be.
bool Fragment::isInResidual(size_t i) const {
  return !layout_.in_place && flight_->average.tensors[i].whole && tensors_[i].compression->done();
}

// δ stays in the start, for the residual, and what is new takes the average's place.
bool Fragment::swaps(size_t i) const {
  return isInResidual(i) && !flight_->average.tensors[i].idle;
}

// After the pass of an outer step, by which the start has become δ where it swaps.
void Fragment::commit(size_t i) {
  OuterTensor& kept = tensors_[i];
  if (!kept.compression || !kept.compression->done()) return;
  if (!isInResidual(i)) return kept.compression->commit();
  const bool swaps = this->swaps(i);
  CodedAverage::Tensor& average = flight_->average.tensors[i];
  at::Tensor free = kept.compression->commitLater(swaps ? kept.start : at::Tensor(), flight_->share(),
                                                  std::move(average.p), std::move(average.r));
  if (swaps) kept.start = std::move(free);
}

// The residual to be is computed now, and the average moves out of its place.
void Fragment::leaveResidual(size_t i) const {
  const OuterTensor& kept = tensors_[i];
  CodedAverage::Tensor& average = flight_->average.tensors[i];
  average.own.assign(average.whole, average.whole + kept.outer.numel());
  average.whole = average.own.data();
  const at::Tensor sent = average.idle ? at::Tensor() : at::empty_like(kept.outer);
  if (sent.defined()) kept.takeDelta(layout_, dataAt(sent, 0), 0, sent.numel());
  kept.compression->commitLater(sent, flight_->share(), std::move(average.p), std::move(average.r));
  kept.compression->settle();
}

void Fragment::apply(Move move) {
  TORCH_INTERNAL_ASSERT(phase_ == Phase::landed);
  const OuterRule rule = this->rule();
  const bool by_mark = move == Move::keeping || (move == Move::by_mode && rule.mode == OuterMode::proceed);
  pass(/*moves=*/true, [&](size_t i, const at::Tensor& host) {
    const OuterTensor& kept = tensors_[i];
    const bool swaps = this->swaps(i);
    eachAveraged(i, [&](uint64_t first, uint64_t count, float* average) {
      float scratch[kOuterBlock];
      OuterSpan s = kept.span(host, first, count);
      s.message = average;
      if (swaps) {
        s.mark = kept.markApart(layout_, first, count, scratch);
      } else if (by_mark) {
        s.mark = kept.markOf(layout_, first, count, scratch);
      }
      stepOuter(s, rule);
      moveParameter(s, rule, move);
    });
  });
  for (size_t i = 0; i < tensors_.size(); ++i)
    commit(i);
  forget();
}

void Fragment::applyAndSend(OpQueue& queue, uint32_t step, double weight) {
  TORCH_INTERNAL_ASSERT(phase_ == Phase::landed);
  ranks_ = queue.size();
  finite_ = true;
  const OuterRule rule = this->rule();
  const bool in_place = layout_.exact || ranks_ == 1;
  const bool deltas = !in_place, apart = deltas && rule.mode == OuterMode::restart && rule.alpha > 0;
  const bool follows = deltas && rule.mode == OuterMode::proceed && layout_.start_is_delta && !layout_.mark_is_outer;
  for (size_t i = 0; i < tensors_.size() && !deltas; ++i) {
    if (isInResidual(i)) leaveResidual(i);
  }
  pass(/*moves=*/true, [&](size_t i, const at::Tensor& host) {
    OuterTensor& kept = tensors_[i];
    const bool wide = !kept.rounding.defined(), swaps = this->swaps(i);
    if (in_place && !kept.message.defined()) kept.message = at::empty_like(kept.outer);
    if (apart && wide && !kept.mark.defined()) kept.mark = at::empty_like(kept.outer);
    eachAveraged(i, [&](uint64_t first, uint64_t count, float* average) {
      float scratch[kOuterBlock];
      OuterSpan s = kept.span(host, first, count);
      s.message = average;
      if (follows && wide) {
        float* start = dataAt(kept.start, first);
        finite_ &=
            s.momentum ? stepAndContinue<true>(s, rule, start, swaps) : stepAndContinue<false>(s, rule, start, swaps);
        return;
      }
      s.mark = swaps ? kept.markApart(layout_, first, count, scratch) : kept.markOf(layout_, first, count, scratch);
      finite_ &= stepAndRestart(s, rule);
      if (in_place) copyElements(dataAt(kept.message, first), s.message, count);
      if (apart && wide) copyElements(dataAt(kept.mark, first), s.mark, count);  // which may stand in the start
      if (swaps) return;
      if (deltas) {
        copyElements(dataAt(kept.start, first), s.message, count);
      } else if (kept.start.defined() && wide) {
        copyElements(dataAt(kept.start, first), s.mark, count);
      }
    });
  });
  for (size_t i = 0; i < tensors_.size(); ++i)
    commit(i);
  layout_.in_place = in_place;
  layout_.start_is_delta = deltas;
  layout_.mark_is_apart = apart;
  layout_.mark_is_outer = deltas && !apart && rule.mode == OuterMode::restart;
  this->queue(queue, step, weight, {});
}

std::vector<at::Tensor> Fragment::pseudoGradients() {
  std::vector<at::Tensor> all;
  pass(/*moves=*/false, [&](size_t i, const at::Tensor& host) {
    all.push_back(at::empty_like(tensors_[i].outer));
    OuterSpan s = tensors_[i].span(host, 0, host.numel());
    s.message = dataAt(all[i], 0);
    takeFromOuter(s);
  });
  return all;
}

void Fragment::restore(const std::vector<at::Tensor>& trained) {
  // A message under way is still applied, to a training that starts here. Its op may read what it is made of.
  pass(/*moves=*/true, [&](size_t i, const at::Tensor& host) {
    copyElements(dataAt(host, 0), dataAt(tensors_[i].outer, 0), host.numel());
    if (!trained.empty()) host.view({-1}).sub_(trained[i].view({-1}));
  });
  layout_.mark_is_outer = true;
}

}  // namespace lowcomm
