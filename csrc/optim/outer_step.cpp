#include "optim/outer_step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace lowcomm {
namespace {

constexpr size_t kBlock = 4096;  // elements that stay in the first cache from one loop to the next

OuterSpan part(const OuterSpan& s, size_t at) {
  const auto on = [at](float* x) { return x ? x + at : nullptr; };
  return {on(s.parameter),   on(s.outer),        on(s.momentum),
          on(s.mark),        on(s.message),      on(s.rounding),
          on(s.own_message), on(s.own_momentum), std::min(kBlock, s.n - at)};
}

// out = a − b.
bool difference(float* out, const float* a, const float* b, size_t n) {
  bool finite = true;
  for (size_t i = 0; i < n; ++i) {
    out[i] = a[i] - b[i];
    finite &= std::fabs(out[i]) <= std::numeric_limits<float>::max();
  }
  return finite;
}

}  // namespace

bool takeFromOuter(const OuterSpan& s) {
  const bool finite = difference(s.message, s.outer, s.parameter, s.n);
  if (!s.rounding) return finite;
  for (size_t i = 0; i < s.n; ++i)
    s.message[i] += s.rounding[i];
  return finite;
}

void stepOuter(const OuterSpan& s, const OuterRule& rule) {
  if (!s.momentum) {
    for (size_t i = 0; i < s.n; ++i)
      s.outer[i] -= rule.lr * s.message[i];
    return;
  }
  for (size_t i = 0; i < s.n; ++i) {
    const float u = rule.momentum * s.momentum[i] + s.message[i];
    s.momentum[i] = u;
    s.outer[i] -= rule.lr * (s.message[i] + rule.momentum * u);
  }
}

void moveParameter(const OuterSpan& s, const OuterRule& rule, Move move) {
  if (move == Move::keeping || (move == Move::by_mode && rule.mode == OuterMode::proceed)) {
    for (size_t i = 0; i < s.n; ++i)
      s.parameter[i] = s.outer[i] + (s.parameter[i] - s.mark[i]);
  } else if (move == Move::by_mode && rule.alpha > 0) {
    for (size_t i = 0; i < s.n; ++i)
      s.parameter[i] = (1 - rule.alpha) * s.outer[i] + rule.alpha * s.parameter[i];
  } else {
    std::memcpy(s.parameter, s.outer, s.n * sizeof(float));
  }
}

bool stepAndRestart(const OuterSpan& s, const OuterRule& rule) {
  float own[kBlock];
  bool finite = true;
  for (size_t at = 0; at < s.n; at += kBlock) {
    const OuterSpan p = part(s, at);
    finite &= difference(own, p.mark, p.parameter, p.n);
    if (rule.mode == OuterMode::eager) {
      stepOwn(p, rule, own, p.mark, true);
      stepOuter(p, rule);
    } else {
      stepOuter(p, rule);
      moveParameter(p, rule, Move::by_mode);
    }
    std::memcpy(p.message, own, p.n * sizeof(float));
    std::memcpy(p.mark, p.parameter, p.n * sizeof(float));
  }
  return finite;
}

void stepOwn(const OuterSpan& s, const OuterRule& rule, const float* own, const float* start, bool arrived) {
  for (size_t i = 0; i < s.n; ++i) {
    float g = own[i] * rule.share;
    if (arrived) g += s.message[i] - s.own_message[i] * rule.share;
    float step = g;
    if (s.own_momentum) {
      const float u = rule.momentum * s.own_momentum[i] + g;
      s.own_momentum[i] = u;
      step += rule.momentum * u;
    }
    s.parameter[i] = start[i] - rule.lr * step;
    s.own_message[i] = own[i];
  }
}

}  // namespace lowcomm
