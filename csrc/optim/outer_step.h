#pragma once

#include <cstddef>

#include "optim/diloco_options.h"

namespace lowcomm {

// The arithmetic of outer steps on spans of fp32, one pass over memory each. Every operation is rounded by itself and
// in the order written, so that equal averages give equal outer parameters on every CPU; called under FloatEnv.

// Elements of one tensor. Those that a function does not name may be null.
struct OuterSpan {
  float* parameter;               // θ, the rank's own
  float* outer;                   // θ̄
  float* momentum;                // u; null where μ is 0
  float* mark;                    // θ as it was when its pseudo-gradient was taken
  float* message;                 // δ, the own pseudo-gradient, then Δ, the average
  float* rounding;                // what writing θ in its own dtype added to it; null where that is fp32
  float* own_message = nullptr;   // mode eager: δ of the message under way
  float* own_momentum = nullptr;  // mode eager: u of the own outer steps
  size_t n;
};

struct OuterRule {
  OuterMode mode;
  float lr, momentum, alpha;
  float share;  // 1/D
};

// δ = θ̄ + rounding − θ, of a span that no message is under way of. Returns whether all of it is finite.
bool takeFromOuter(const OuterSpan& s);

// Nesterov's step of torch.optim.SGD: u = μ·u + Δ; θ̄ = θ̄ − γ·(Δ + μ·u).
void stepOuter(const OuterSpan& s, const OuterRule& rule);

// Where θ goes with an outer step.
enum class Move : uint8_t {
  by_mode,  // continue: θ̄ and what the rank has trained since the mark, θ̄ + (θ − mark); restart: (1−α)·θ̄ + α·θ
  whole,    // θ̄: a synchronous step
  keeping,  // as continue, whatever the mode
};
void moveParameter(const OuterSpan& s, const OuterRule& rule, Move move);

// An average has come when the next pseudo-gradient is due: δ' = mark − θ, then stepOuter and moveParameter, then
// message = δ', mark = θ. Returns whether δ' is finite.
bool stepAndRestart(const OuterSpan& s, const OuterRule& rule);

// Mode eager in place of that: `own` is δ', and where `arrived` the message holds Δ; g = δ'/D (+ Δ − own_message/D),
// own_momentum = μ·own_momentum + g, θ = start − γ·(g + μ·own_momentum), own_message = δ'. `start` is where δ' began.
void stepOwn(const OuterSpan& s, const OuterRule& rule, const float* own, const float* start, bool arrived);

}  // namespace lowcomm
