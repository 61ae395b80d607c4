#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/op_queue.h"
#include "optim/diloco_options.h"
#include "optim/fragment.h"

namespace lowcomm {

// A report on the last outer step.
struct OuterReport {
  int64_t outer_steps = 0;    // sent so far, of all fragments
  int participating = 0;      // ranks that were averaged
  int64_t sync_every = 0;     // H_t
  double rank = 0;            // r_t; 0 without factors
  double effective_rank = 0;  // r'_t
  uint64_t sent_bytes = 0;    // by this rank, for the average that came last; frame headers included
  double waited_s = 0;        // for that average to come: what of its way was not hidden
  double local_s = 0;         // of the last step() that took or applied anything, what it did not wait
};

// An outer loop around any inner optimizer (DiLoCo, arXiv 2311.08105; DiLoCoX, arXiv 2506.21263; Streaming DiLoCo,
// arXiv 2501.18512). Ranks train by themselves; every `sync_every` inner steps the pseudo-gradient, what training has
// moved the parameters by, is compressed, averaged over the group while training goes on, and taken as the gradient of
// an outer step by SGD with Nesterov momentum:
//
//   δ_t = θ_start − θ_end;  start averaging C(δ_t + e);  θ̄_t = OuterOpt(θ̄_{t−1}, Δ_{t−1});  go on from where `mode`
//   says
//
// The ranks of a group hold the same parameters (or the same shards of them, or the same pipeline stage), not
// necessarily with the same values, and end every outer step with the same bits in θ̄ and momentum.
//
// An error of the group, or an average that is not finite, leaves θ̄, momentum, residuals and factors as they were after
// the last outer step that was applied, drops what is under way, and is thrown by the step() that meets it; the
// parameters stay as they are. One thread at a time.
class DiLoCoX {
 public:
  // Collective over `group`: compares options, names, shapes and values of the parameters. `cluster`, unless null: the
  // ranks that hold the other shards or stages of this rank's model, among which sync_every is agreed where it adapts.
  // `buffers` are averaged as they are, exactly, at every outer step of the first fragment. Where `group` is null
  // nobody is asked, and regroup() comes before the first step().
  //
  // Throws ValueError for options and parameters that will not do, TypeError for their dtypes, PeerRefusal naming what
  // differs on another rank, PeerError.
  DiLoCoX(std::vector<OuterParameter> parameters, std::shared_ptr<OpQueue> group, DiLoCoXOptions options,
          std::shared_ptr<OpQueue> cluster = nullptr, std::vector<OuterParameter> buffers = {});
  ~DiLoCoX();
  DiLoCoX(const DiLoCoX&) = delete;
  DiLoCoX& operator=(const DiLoCoX&) = delete;

  // To be called after every inner step. Returns whether any pseudo-gradient was sent or outer step applied. Throws
  // PeerError and PeerRefusal (another rank or the network), ValueError (an average that is not finite). Where
  // sync_every adapts in a cluster, an error of one stage's average is every stage's, of the same type.
  bool step();

  // Applies what is under way, moves the parameters to θ̄, and waits until every rank has: the end of training.
  // Collective.
  void finish();

  // Applies what is under way, keeping in the parameters what was trained since it was sent, and waits until every rank
  // has: nothing is on its way when it returns, and the group can be left. Collective, after the same step() on all
  // ranks.
  void quiesce();

  // Goes on in another group: ranks were lost, or have come. Drops what is under way; of ranks that differ in how many
  // outer steps they have applied, those behind take θ̄, momentum, factors and counters from the most advanced one and
  // move their parameters to θ̄; what the others have trained since their last outer step counts in the next.
  // Residuals stay each rank's own. Collective over the new group, whose ranks need not be those of the old one.
  // Throws as the constructor, except for parameters' values, which may differ.
  void regroup(std::shared_ptr<OpQueue> group);

  // Parameters and buffers become θ̄; what was trained since the last outer step is given up.
  void restore();

  // Calls with every parameter and buffer and its θ̄, fp32 in host memory.
  void each(const std::function<void(const OuterParameter&, const at::Tensor& outer)>& call);

  // Options, and names and shapes of the parameters: equal on all ranks of a group.
  std::string agreed() const;

  const OuterReport& report() const { return report_; }
  const DiLoCoXOptions& options() const { return options_; }
  int64_t steps() const { return steps_; }

  // The contents of a checkpoint: tensors under the parameters' names, counters, and under "own.…" what is this rank's
  // alone. Waits for messages under way, so every rank of the group calls it after the same step; a run that loads it
  // (and its inner optimizer and parameters) goes on with the same bits. With a cluster all ranks of all stages have
  // their state, or all throw: PeerRefusal naming the rank that failed and why; what has come there stays.
  TensorMap state();

  // In place of state(), on a rank that cannot write its checkpoint for a reason of its own: tells the others.
  void stateFailed(const std::string& error);

  // Throws ValueError naming what is missing or does not fit, a number of ranks among it (not before the first
  // regroup() of one without a group); nothing has changed then.
  void load(const TensorMap& state);

 private:
  struct FragmentSchedule {
    Fragment fragment;
    bool buffers;                    // averaged exactly, next to the first fragment
    int64_t send_at, apply_at = -1;  // inner steps
    int64_t sent = 0;
  };
  void agree(const std::string& error, bool values);
  void applyAll(Move move);
  void leaveGroup();
  void takeFrom(int root, bool behind, bool tensors);
  void outerStep(FragmentSchedule& scheduled);
  void arrive(FragmentSchedule& scheduled, Move move);
  void landed(FragmentSchedule& scheduled);
  void adapt();
  bool agreesInCluster() const;
  double rankInCluster();
  void tellCluster(const std::exception_ptr& error);
  void agreeOnState(std::string error);
  void agreeWithout(const FragmentSchedule& scheduled);
  void startCheck();
  void giveUp();
  TensorMap counters() const;
  uint32_t checksum() const;

  const DiLoCoXOptions options_;
  std::shared_ptr<OpQueue> group_, cluster_;
  DiLoCoXOptions buffer_options_;  // of buffers: an exact mean
  std::deque<FragmentSchedule> fragments_;
  size_t of_parameters_ = 0;  // fragments; one of buffers may follow
  std::string shapes_;
  Adaptation adaptation_;
  int64_t steps_ = 0, sync_every_, applied_ = 0;
  double rank_, waited_s_ = 0;
  Ticket check_;
  std::exception_ptr late_;  // of a rule of the user's: thrown when the outer step is whole
  OuterReport report_;
};

}  // namespace lowcomm
