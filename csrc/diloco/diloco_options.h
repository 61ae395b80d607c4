#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "codec/spec.h"
#include "wire/key_values.h"

namespace lowcomm {

// Where inner training goes on while an averaged pseudo-gradient is on its way (DiLoCoX, arXiv 2506.21263,
// section 2.3). With θ̄ the outer parameters, δ_t the rank's own pseudo-gradient of outer step t, Δ_t the average over
// the D ranks:
enum class OuterMode : uint8_t {
  sync,     // nowhere: the step waits for Δ_t and starts from θ̄_t (DiLoCo, arXiv 2311.08105)
  proceed,  // "continue": θ̄_t − δ_t, the outer point plus the own part that is not averaged yet
  restart,  // θ̄_t, or with `alpha` (1−α)·θ̄_t + α·θ (Streaming DiLoCo, arXiv 2501.18512)
};

const char* outerModeName(OuterMode mode);

// Throws ValueError naming the modes.
OuterMode outerMode(const std::string& name);

// How an outer loop runs. Every rank of the group has the same.
struct DiLoCoXOptions {
  int64_t sync_every = 0;  // H_1: inner steps from one outer step of a fragment to its next
  // Above 0: an interval ends after so many seconds by the clock of a site's first rank, and at the latest after
  // sync_every inner steps; contributions count by their samples.
  double sync_seconds = 0;
  // Above 0: the number of sites that a group needs. The caller of regroup() leaves late sites out (OuterPlace), and
  // what these have trained counts when they come back.
  int64_t quorum = 0;
  OuterMode mode = OuterMode::proceed;
  int64_t fragments = 1;  // parts of the parameters, each with outer steps of its own, spread evenly over sync_every
  int64_t delay = 0;      // τ: inner steps from sending to applying; 0: sync_every, but none with mode sync
  double alpha = 0;       // mode restart: in [0, 1), the share of the own parameters that is kept
  // So many first outer steps (of each fragment) run as with mode sync. DiLoCoX's paper gives no number; a tenth of all
  // is our choice.
  int64_t sync_warmup = 0;
  double lr = 0.7;        // γ
  double momentum = 0.6;  // μ, in [0, 1); Nesterov's

  CodecSpec codec;            // of pseudo-gradients; none: fp32, exact
  CodecSpec projection;       // of the first low-rank factor, P; the default: `codec`
  double error_feedback = 0;  // the share of a residual that is added to the next pseudo-gradient; 0: no residual
  bool eight_bits = false;    // residuals are kept in 8 bits
  int64_t rank = 0;           // r_1, of matrices whose factors are smaller than they; 0: no factors

  // Adaptive compression: see Adaptation.
  bool adapt_rank = false, adapt_sync_every = false;
  int64_t min_rank = 1;

  int64_t check_every = 10;  // outer steps between comparisons of a checksum of θ̄ over the ranks; 0: none
  uint64_t seed = 0;         // of the first factors and of random roundings

  // Throws ValueError naming the field, what is expected and what it is.
  void check() const;

  // The options that must be equal on all ranks, by the names that lc.DiLoCoX has for them; and as one text.
  KeyValues fields() const;
  std::string text() const;

  // Whether pseudo-gradients are sent in fp32.
  bool isExact() const { return codec.id == CodecId::none; }

  // τ of a fragment whose outer steps are `sync_every` apart.
  int64_t delayOf(int64_t sync_every) const { return mode == OuterMode::sync ? 0 : delay == 0 ? sync_every : delay; }
};

// Rank and interval by the effective rank of pseudo-gradients (DiLoCoX, arXiv 2506.21263, section 2.4.3, "adaptive
// gradient compress algorithm"): r'_t, that of outer step t, is the mean over its matrices of the least number of
// singular values of the average Δ_t that have kEnergy of the squares' sum; r_t is the mean of the last kWindow of them
// (r_1 while there are fewer), within [min_rank, r_1]; H_t = max(⌊H_1/4⌋, fragments, round(H_1·r_t/r_1)). The window is
// the paper's, which gives no other number. Δ_t has passed through factors of rank r_t and shows no more directions
// than these: r_t does not rise above the rank that is sent. All of it follows from averages, which are the same on all
// ranks of a group.
class Adaptation {
 public:
  static constexpr int64_t kWindow = 5;
  static constexpr double kEnergy = 0.95;

  // `options` outlives this.
  explicit Adaptation(const DiLoCoXOptions& options) : options_(options) {}

  // r'_t of one more outer step.
  void add(double effective_rank) { effective_.push_back(effective_rank); }

  // r_t, not rounded.
  double rank() const;

  // H_t for that r_t: at least a quarter of H_1, and an inner step for each fragment.
  int64_t syncEvery(double rank) const;

  const std::vector<double>& effectiveRanks() const { return effective_; }
  void set(std::vector<double> effective_ranks) { effective_ = std::move(effective_ranks); }

 private:
  const DiLoCoXOptions& options_;
  std::vector<double> effective_;
};

// The arithmetic of outer steps on spans of fp32, one pass over memory each. Every operation is rounded by itself and
// in the order written, so that equal averages give equal outer parameters on every CPU; called under FloatEnv.

constexpr int64_t kOuterBlock = 4096;  // elements that stay in the first cache from one loop to the next

// Elements of one tensor. Those that a function does not name may be null.
struct OuterSpan {
  float* parameter;  // θ, the rank's own
  float* outer;      // θ̄
  float* momentum;   // u; null where μ is 0
  float* mark;       // θ as it was when its pseudo-gradient was taken
  float* message;    // δ, the own pseudo-gradient, then Δ, the average
  float* rounding;   // what writing θ in its own dtype added to it; null where that is fp32
  size_t n;
};

struct OuterRule {
  OuterMode mode;
  float lr, momentum, alpha;
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

}  // namespace lowcomm
