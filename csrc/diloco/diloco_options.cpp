#include "diloco/diloco_options.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "kernels/finite.h"
#include "tensor/host_parameters.h"

namespace lowcomm {

namespace {

constexpr std::array<const char*, 3> kModes = {"sync", "continue", "restart"};

template <class T>
[[noreturn]] void refuse(const char* field, const std::string& expected, T got) {
  throw ValueError(std::string("DiLoCoX: ") + field + ": expected " + expected + ", got " + std::to_string(got));
}

void expectAtLeast(const char* field, int64_t least, int64_t got) {
  if (got < least) refuse(field, std::to_string(least) + " or more", got);
}

}  // namespace

const char* outerModeName(OuterMode mode) {
  return kModes[static_cast<size_t>(mode)];
}

OuterMode outerMode(const std::string& name) {
  for (size_t i = 0; i < kModes.size(); ++i) {
    if (name == kModes[i]) return static_cast<OuterMode>(i);
  }
  throw ValueError("DiLoCoX: mode: expected sync, continue or restart, got '" + name + "'");
}

void DiLoCoXOptions::check() const {
  expectAtLeast("sync_every", 1, sync_every);
  if (!(sync_seconds >= 0) || std::isinf(sync_seconds)) refuse("sync_seconds", "a number above 0", sync_seconds);
  if (sync_seconds > 0 && adapt_sync_every)
    refuse("sync_seconds", "none with an adaptive sync_every, which counts steps", sync_seconds);
  // Sites apply at steps of their own: what they send in between would come in other orders.
  if (sync_seconds > 0 && fragments > 1 && delay > 0)
    refuse("fragment_sync_delay", "none with sync_seconds and several fragments", delay);
  if (fragments < 1 || fragments > sync_every)
    refuse("fragments", "1..." + std::to_string(sync_every) + " (sync_every)", fragments);
  if (delay < 0 || delay > sync_every)
    refuse("fragment_sync_delay", "1..." + std::to_string(sync_every) + " (sync_every)", delay);
  if (delay > 0 && mode == OuterMode::sync) refuse("fragment_sync_delay", "none with mode sync, which waits", delay);
  if (delay > 0 && delay < sync_every && adapt_sync_every)
    refuse("fragment_sync_delay", "none with an adaptive sync_every, which may fall below it", delay);
  if (!(alpha >= 0 && alpha < 1)) refuse("fragment_update_alpha", "a number in [0, 1)", alpha);
  if (alpha > 0 && mode != OuterMode::restart)
    refuse("fragment_update_alpha", std::string("0 with mode ") + outerModeName(mode) + " (it is restart's)", alpha);
  expectAtLeast("quorum", 0, quorum);
  expectAtLeast("sync_warmup", 0, sync_warmup);
  if (!(lr > 0) || std::isinf(lr)) refuse("outer_lr", "a number above 0", lr);
  if (!(momentum >= 0 && momentum < 1)) refuse("outer_momentum", "a number in [0, 1)", momentum);
  if (!(error_feedback >= 0 && error_feedback <= 1)) refuse("error_feedback", "a bool, or in (0, 1]", error_feedback);
  expectAtLeast("rank", 0, rank);
  for (const CodecSpec& spec : {codec, projection})
    expectMessageCodec("DiLoCoX", spec);
  const bool exact = codec.id == CodecId::none;
  if (exact && (rank > 0 || error_feedback > 0 || projection.id != CodecId::none))
    throw ValueError("DiLoCoX: codec: expected one with rank, projection_codec or error_feedback, got none");
  if (projection.id != CodecId::none && rank == 0)
    throw ValueError("DiLoCoX: projection_codec: expected rank with it, got none");
  if (eight_bits && error_feedback == 0)
    throw ValueError("DiLoCoX: residual_dtype: expected error_feedback with int8, got none");
  if ((adapt_rank || adapt_sync_every) && rank == 0)
    throw ValueError("DiLoCoX: adaptive compression: expected a rank, got none");
  if (rank > 0 && (min_rank < 1 || min_rank > rank)) refuse("min_rank", "1..." + std::to_string(rank), min_rank);
  if (min_rank != 1 && !adapt_rank && !adapt_sync_every)
    refuse("min_rank", "1 without adapt_rank and adapt_sync_every", min_rank);
  expectAtLeast("check_every", 0, check_every);
}

KeyValues DiLoCoXOptions::fields() const {
  const auto truth = [](bool value) { return std::string(value ? "True" : "False"); };
  const auto orNone = [](auto value) { return value == 0 ? std::string("None") : c10::str(value); };
  return {{{"sync_every", c10::str(sync_every)},
           {"sync_seconds", orNone(sync_seconds)},
           {"quorum", orNone(quorum)},
           {"mode", outerModeName(mode)},
           {"fragments", c10::str(fragments)},
           {"fragment_sync_delay", orNone(delay)},
           {"fragment_update_alpha", c10::str(alpha)},
           {"sync_warmup", c10::str(sync_warmup)},
           {"outer_lr", c10::str(lr)},
           {"outer_momentum", c10::str(momentum)},
           {"codec", codec.str()},
           {"projection_codec", projection.str()},
           {"error_feedback",
            error_feedback == 0 || error_feedback == 1 ? truth(error_feedback > 0) : c10::str(error_feedback)},
           {"residual_dtype", eight_bits ? "int8" : "float32"},
           {"rank", orNone(rank)},
           {"adapt_rank", truth(adapt_rank)},
           {"adapt_sync_every", truth(adapt_sync_every)},
           {"min_rank", c10::str(min_rank)},
           {"check_every", c10::str(check_every)},
           {"seed", c10::str(seed)}}};
}

std::string DiLoCoXOptions::text() const {
  const KeyValues options = fields();
  std::string text;
  for (const auto& [name, value] : options.fields)
    text += (text.empty() ? "" : " ") + name + "=" + value;
  return text;
}

double Adaptation::rank() const {
  const auto first = static_cast<double>(options_.rank);
  if ((!options_.adapt_rank && !options_.adapt_sync_every) || effective_.empty()) return first;
  if (effective_.size() < static_cast<size_t>(kWindow)) return first;
  const double sum = std::accumulate(effective_.end() - kWindow, effective_.end(), 0.0);
  return std::clamp(sum / static_cast<double>(kWindow), static_cast<double>(options_.min_rank), first);
}

int64_t Adaptation::syncEvery(double rank) const {
  if (!options_.adapt_sync_every) return options_.sync_every;
  const auto steps =
      static_cast<int64_t>(std::llround(static_cast<double>(options_.sync_every) * rank / options_.rank));
  return std::max({steps, options_.sync_every / 4, options_.fragments});
}

namespace {

constexpr size_t kBlock = kOuterBlock;

OuterSpan part(const OuterSpan& s, size_t at) {
  const auto on = [at](float* x) { return x ? x + at : nullptr; };
  return {on(s.parameter),           on(s.outer), on(s.momentum), on(s.mark), on(s.message), on(s.rounding),
          std::min(kBlock, s.n - at)};
}

// out = a − b.
bool difference(float* out, const float* a, const float* b, size_t n) {
  int32_t room = 0;
  for (size_t i = 0; i < n; ++i) {
    out[i] = a[i] - b[i];
    room |= finiteRoom(out[i]);
  }
  return room >= 0;
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
    stepOuter(p, rule);
    moveParameter(p, rule, Move::by_mode);
    std::memcpy(p.message, own, p.n * sizeof(float));
    std::memcpy(p.mark, p.parameter, p.n * sizeof(float));
  }
  return finite;
}

}  // namespace lowcomm
