// The passes of a fragment over its parameters, and what they make of start, mark and average.
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>

#include "base/float_env.h"
#include "diloco/fragment.h"
#include "kernels/finite.h"
#include "kernels/isa/table.h"
#include "kernels/reduce.h"
#include "tensor/host_parameters.h"
#include "tensor/wire_type.h"

namespace lowcomm {
namespace {

float* dataAt(const at::Tensor& tensor, int64_t first) {
  return tensor.defined() ? tensor.mutable_data_ptr<float>() + first : nullptr;
}

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

void copy(float* to, const float* from, int64_t count) {
  if (to != from) std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
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
  for (const ParameterState& kept : kept_)
    parameters.push_back(kept.parameter.tensor);
  HostParameters hosts(std::move(parameters));
  for (size_t i = 0; i < kept_.size(); ++i) {
    ParameterState& kept = kept_[i];
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

// Without message and mark.
OuterSpan Fragment::spanOf(const ParameterState& kept, const at::Tensor& host, int64_t first, int64_t count) const {
  return {dataAt(host, first),
          dataAt(kept.outer, first),
          dataAt(kept.momentum, first),
          nullptr,
          nullptr,
          dataAt(kept.rounding, first),
          static_cast<size_t>(count)};
}

// The mark of elements [first, first + count), where it stands or in `scratch`; may be written to.
float* Fragment::markOf(const ParameterState& kept, int64_t first, int64_t count, float* scratch) const {
  const auto n = static_cast<uint64_t>(count);
  if (kept.rounding.defined()) {
    if (kept.mark.scalar_type() == at::kFloat) return dataAt(kept.mark, first);
    const auto* mark = static_cast<const uint16_t*>(kept.mark.const_data_ptr()) + first;
    reduceAssign(scratch, mark, wireType(kept.mark.scalar_type()), n);
  } else if (mark_is_outer_) {
    copy(scratch, dataAt(kept.outer, first), count);
  } else if (start_ == Start::mark) {
    return dataAt(kept.start, first);
  } else if (mark_is_apart_) {
    return dataAt(kept.mark, first);
  } else {
    kernels().difference(scratch, dataAt(kept.outer, first), dataAt(kept.start, first), n);
  }
  return scratch;
}

void Fragment::send(OpQueue& queue, uint32_t step, bool marks, double weight) {
  TORCH_INTERNAL_ASSERT(phase_ == Phase::idle);
  ranks_ = queue.size();
  finite_ = true;
  in_place_ = isExact() || ranks_ == 1;
  start_ = marks || isExact() ? Start::mark : Start::delta;
  mark_is_outer_ = mark_is_apart_ = false;
  std::vector<at::Tensor> parameters;
  pass(/*moves=*/false, [&](size_t i, const at::Tensor& host) {
    ParameterState& kept = kept_[i];
    if (in_place_ && !kept.message.defined()) kept.message = at::empty_like(kept.outer);
    const bool delta = kept.start.defined() && holdsDelta(kept);
    eachBlock(host.numel(), [&](int64_t first, int64_t count) {
      float scratch[kOuterBlock];
      OuterSpan s = spanOf(kept, host, first, count);
      s.message = in_place_ ? dataAt(kept.message, first) : delta ? dataAt(kept.start, first) : scratch;
      finite_ &= takeFromOuter(s);
      if (marks && kept.start.defined() && !delta) copy(dataAt(kept.start, first), s.parameter, count);
    });
    parameters.push_back(host);
  });
  this->queue(queue, step, weight, parameters);
}

bool Fragment::holdsDelta(const ParameterState& kept) const {
  return start_ == Start::delta || (kept.rounding.defined() && !isExact());
}

// f(first, count, Δ) of a tensor, of the average that has landed.
void Fragment::arrived(size_t i, const TakeElements& take) const {
  const auto blocks = [&](uint64_t first, uint64_t count, float* x) {
    eachBlock(static_cast<int64_t>(count), [&](int64_t more, int64_t n) { take(first + more, n, x + more); });
  };
  if (in_place_) {
    blocks(0, static_cast<uint64_t>(kept_[i].outer.numel()), dataAt(kept_[i].message, 0));
  } else {
    flight_->average.decode(i, blocks);
  }
}

// The average that has landed stands in the place of the residual to be.
bool Fragment::isInResidual(size_t i) const {
  return !in_place_ && flight_->average.tensors[i].whole && kept_[i].compression->done();
}

// δ stays in the start, for the residual, and what is new takes the average's place.
bool Fragment::swaps(size_t i) const {
  return isInResidual(i) && !flight_->average.tensors[i].idle;
}

// δ of the message that has landed; may be written over the start.
void Fragment::takeDelta(const ParameterState& kept, float* delta, int64_t first, int64_t count) const {
  float* start = dataAt(kept.start, first);
  if (holdsDelta(kept)) {
    copy(delta, start, count);
  } else {
    kernels().difference(delta, dataAt(kept.outer, first), start, static_cast<uint64_t>(count));
  }
}

// The mark, in `scratch` where it stood in the start, which becomes δ.
float* Fragment::markApart(const ParameterState& kept, int64_t first, int64_t count, float* scratch) const {
  float* mark = markOf(kept, first, count, scratch);
  if (holdsDelta(kept)) return mark;
  copy(scratch, mark, count);
  takeDelta(kept, dataAt(kept.start, first), first, count);
  return scratch;
}

// After the pass of an outer step, by which the start has become δ where it swaps.
void Fragment::commit(size_t i) {
  ParameterState& kept = kept_[i];
  if (!kept.compression || !kept.compression->done()) return;
  if (!isInResidual(i)) return kept.compression->commit();
  const bool swaps = this->swaps(i);
  CodedAverage::Tensor& average = flight_->average.tensors[i];
  at::Tensor free = kept.compression->commitLater(swaps ? kept.start : at::Tensor(), flight_->share(),
                                                  std::move(average.p), std::move(average.r));
  if (swaps) kept.start = std::move(free);
}

// The residual to be is computed now, and the average moves out of its place.
void Fragment::settle(size_t i) const {
  const ParameterState& kept = kept_[i];
  CodedAverage::Tensor& average = flight_->average.tensors[i];
  average.own.assign(average.whole, average.whole + kept.outer.numel());
  average.whole = average.own.data();
  const at::Tensor sent = average.idle ? at::Tensor() : at::empty_like(kept.outer);
  if (sent.defined()) takeDelta(kept, dataAt(sent, 0), 0, sent.numel());
  kept.compression->commitLater(sent, flight_->share(), std::move(average.p), std::move(average.r));
  kept.compression->settle();
}

void Fragment::apply(Move move) {
  TORCH_INTERNAL_ASSERT(phase_ == Phase::landed);
  applyAverage(move);
  for (size_t i = 0; i < kept_.size(); ++i) {
    ParameterState& kept = kept_[i];
    commit(i);
    if (!isExact()) kept.message = at::Tensor();
  }
  flight_.reset();
  phase_ = Phase::idle;
}

void Fragment::applyAverage(Move move) {
  const OuterRule rule = this->rule();
  const bool by_mark = move == Move::keeping || (move == Move::by_mode && rule.mode == OuterMode::proceed);
  pass(/*moves=*/true, [&](size_t i, const at::Tensor& host) {
    const bool swaps = this->swaps(i);
    arrived(i, [&](uint64_t first, uint64_t count, float* average) {
      float scratch[kOuterBlock];
      OuterSpan s = spanOf(kept_[i], host, first, count);
      s.message = average;
      if (swaps) {
        s.mark = markApart(kept_[i], first, count, scratch);
      } else if (by_mark) {
        s.mark = markOf(kept_[i], first, count, scratch);
      }
      stepOuter(s, rule);
      moveParameter(s, rule, move);
    });
  });
}

void Fragment::applyAndSend(OpQueue& queue, uint32_t step, double weight) {
  TORCH_INTERNAL_ASSERT(phase_ == Phase::landed);
  ranks_ = queue.size();
  finite_ = true;
  const OuterRule rule = this->rule();
  const bool in_place = isExact() || ranks_ == 1;
  const bool deltas = !in_place, apart = deltas && rule.mode == OuterMode::restart && rule.alpha > 0;
  const bool follows = deltas && rule.mode == OuterMode::proceed && start_ == Start::delta && !mark_is_outer_;
  for (size_t i = 0; i < kept_.size() && !deltas; ++i) {
    if (isInResidual(i)) settle(i);
  }
  pass(/*moves=*/true, [&](size_t i, const at::Tensor& host) {
    ParameterState& kept = kept_[i];
    const bool wide = !kept.rounding.defined(), swaps = this->swaps(i);
    if (in_place && !kept.message.defined()) kept.message = at::empty_like(kept.outer);
    if (apart && wide && !kept.mark.defined()) kept.mark = at::empty_like(kept.outer);
    arrived(i, [&](uint64_t first, uint64_t count, float* average) {
      float scratch[kOuterBlock];
      OuterSpan s = spanOf(kept, host, first, count);
      s.message = average;
      if (follows && wide) {
        float* start = dataAt(kept.start, first);
        finite_ &=
            s.momentum ? stepAndContinue<true>(s, rule, start, swaps) : stepAndContinue<false>(s, rule, start, swaps);
        return;
      }
      s.mark = swaps ? markApart(kept, first, count, scratch) : markOf(kept, first, count, scratch);
      finite_ &= stepAndRestart(s, rule);
      if (in_place) copy(dataAt(kept.message, first), s.message, count);
      if (apart && wide) copy(dataAt(kept.mark, first), s.mark, count);  // which may stand in the start
      if (swaps) return;
      if (deltas) {
        copy(dataAt(kept.start, first), s.message, count);
      } else if (kept.start.defined() && wide) {
        copy(dataAt(kept.start, first), s.mark, count);
      }
    });
  });
  for (size_t i = 0; i < kept_.size(); ++i)
    commit(i);
  in_place_ = in_place;
  start_ = deltas ? Start::delta : Start::mark;
  mark_is_apart_ = apart;
  mark_is_outer_ = deltas && !apart && rule.mode == OuterMode::restart;
  this->queue(queue, step, weight, {});
}

void Fragment::restore() {
  // A message under way is still applied, to a training that starts here. Its op may read what it is made of.
  pass(/*moves=*/true, [&](size_t i, const at::Tensor& host) {
    copy(dataAt(host, 0), dataAt(kept_[i].outer, 0), host.numel());
  });
  mark_is_outer_ = true;
}

}  // namespace lowcomm
