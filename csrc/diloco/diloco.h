#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "diloco/diloco_options.h"
#include "diloco/handover.h"
#include "diloco/interval_clock.h"
#include "diloco/site_model.h"
#include "diloco/site_vote.h"
#include "engine/op_queue.h"

namespace lowcomm {

// A report on the last outer step.
struct OuterReport {
  int64_t outer_steps = 0;               // sent so far, of all fragments
  int participating = 0;                 // ranks that were averaged
  int64_t sync_every = 0;                // H_t
  double rank = 0;                       // r_t; 0 without factors
  double effective_rank = 0;             // r'_t
  uint64_t sent_bytes = 0;               // by this rank, for the average that came last; frame headers included
  uint64_t total_sent_bytes = 0;         // for all averages that came, in the groups before, too
  std::vector<int64_t> stripe_elements;  // that each stripe of this rank's part of the model averages
  std::vector<int> stripes;              // those that this rank carries
  uint64_t taken_bytes = 0;              // of outer state, that this rank took from others at the last regroup()
  double taken_s = 0;                    // that taking it lasted, waits for the others included
  double late_samples = 0;     // of this site, trained when it was late, that count in its next average; a sum
  double dropped_samples = 0;  // of this site, in parameters that gave way to other sites' at a regroup()
  double waited_s = 0;         // for that average to come: what of its way was not hidden
  double total_waited_s = 0;   // for all averages, buffers' too
  double local_s = 0;          // of the last step() that took or applied anything, what it did not wait
  OuterMemory memory;          // of all fragments, each with its last average
};

// How far an outer loop has come: what a site that joins takes from the others.
struct OuterProgress {
  int64_t steps = 0, applied = 0, sync_every = 0, outer_steps = 0;  // inner steps; outer steps applied and sent; H_t
  double step_s = 0;                                                // of an inner step; 0: not known
  std::vector<int64_t> sent;                                        // outer steps, by fragment
  std::vector<double> effective_ranks;                              // r'_t of all outer steps
};

// The progress of a loop, for a thread that checks whether the loop waits for a late site. A site is late for an outer
// step if it has begun fewer.
struct OuterPlace {
  std::atomic<int64_t> begun = 0;    // outer steps of this group, of all fragments
  std::atomic<int64_t> awaited = 0;  // the one whose average the loop waits for now; 0 while it waits for none
};

// While it lives, the loop counts as kLater outer steps further: it is at a checkpoint, or at the end of a group, where
// all sites meet.
struct Meeting {
  static constexpr int64_t kLater = 1 << 20;

  explicit Meeting(OuterPlace& place) : place(place) { place.begun += kLater; }
  ~Meeting() { place.begun -= kLater; }

  OuterPlace& place;
};

// Names the outer step that is waited for, as long as it lives.
struct Awaiting {
  Awaiting(OuterPlace& place, int64_t step) : place(place) { place.awaited = step; }
  ~Awaiting() { place.awaited = 0; }

  OuterPlace& place;
};

// An outer loop around any inner optimizer (DiLoCo, arXiv 2311.08105; DiLoCoX, arXiv 2506.21263; Streaming DiLoCo,
// arXiv 2501.18512). Ranks train by themselves; every `sync_every` inner steps the pseudo-gradient, what training has
// moved the parameters by, is compressed, averaged over the group while training goes on, and taken as the gradient of
// an outer step by SGD with Nesterov momentum:
//
//   δ_t = θ_start − θ_end;  start averaging C(δ_t + e);  θ̄_t = OuterOpt(θ̄_{t−1}, Δ_{t−1});  go on from where `mode`
//   says
//
// A site is one rank, or several that hold one model together: replicas, shards, stages (OuterSite). What its ranks
// average with other sites is divided among them (SiteModel): each carries a stripe, and keeps outer state for it
// alone. The ranks of a stripe, one a site, end every outer step with the same bits in θ̄ and momentum.
//
// An error of a stripe, or an average that is not finite, leaves θ̄, momentum, residuals and factors as they were after
// the last outer step that was applied, drops what is under way, and is thrown by the step() that meets it, on all
// ranks of the site; the parameters stay as they are. One thread at a time.
class DiLoCoX {
 public:
  // Collective over the site and over `stripes`: compares options, names, shapes and values of the parameters.
  // `stripes`: the groups in which the stripes that this rank carries are averaged, in the order of
  // SiteModel::stripes(); if it is empty no other rank is asked, and regroup() must come before the first step().
  // `buffers` are averaged as they are, exactly, at every outer step of the first fragment; with replicas in a site the
  // first one's are used.
  //
  // Throws ValueError for options and parameters that do not fit, TypeError for their dtypes, PeerRefusal naming what
  // differs on another rank, PeerError.
  DiLoCoX(std::vector<OuterParameter> parameters, std::vector<std::shared_ptr<OpQueue>> stripes, DiLoCoXOptions options,
          OuterSite site = {}, std::vector<OuterParameter> buffers = {});

  // A rank that averages all that it holds over `group` (null: regroup() comes first). `cluster`: the other shards or
  // stages of its model.
  DiLoCoX(std::vector<OuterParameter> parameters, std::shared_ptr<OpQueue> group, DiLoCoXOptions options,
          std::shared_ptr<OpQueue> cluster = nullptr, std::vector<OuterParameter> buffers = {});

  // Replaces the constructor on a rank that cannot construct one for a reason of its own: tells the other ranks, which
  // throw.
  static void refuse(const std::string& error, const std::vector<std::shared_ptr<OpQueue>>& stripes,
                     const OuterSite& site);

  // To be called after every inner step, of `samples` samples of the site: by them its part of an average counts with
  // sync_seconds or a quorum, else they mean nothing. Returns whether any pseudo-gradient was sent or outer step
  // applied. Throws PeerError and PeerRefusal (another rank or the network), ValueError (an average that is not
  // finite). An error of one rank's average is thrown on every rank of its site, of the same type.
  bool step(double samples = 1);

  // Applies what is under way, moves the parameters to θ̄, and waits until every rank has: the end of training.
  // Collective.
  //
  // `sends`: first takes an outer step of what no message has carried, as after a finish() whose group ended.
  void finish(bool sends = false);

  // Applies what is under way, keeping in the parameters what was trained since it was sent, and waits until every rank
  // has: nothing is on its way when it returns, and the group can be left. Collective, after the same step() on all
  // ranks.
  void quiesce();

  // Goes on in other groups, one for each stripe that this rank carries: sites were lost, or have come. Drops what is
  // under way. Of sites that differ in how many outer steps they have applied, those behind take θ̄, momentum, factors
  // and counters from the most advanced ones, each tensor from one of them in turn, and move their parameters to θ̄.
  // On the others it returns before those behind have all: they go on training, with a copy of what they give until it
  // is sent (not in report().memory), and what they have trained since their last outer step counts in the next. A
  // later call that waits throws there what becomes of the handover. Those behind leave out about as many inner steps
  // as the others have made meanwhile, which steps() counts. Residuals stay each rank's own.
  //
  // With a quorum a site that is behind keeps what it has trained since its last outer step, for its next average,
  // unless that is in an average of the others already; and where none is behind, the next inner step ends the
  // interval. Where another site or the network fails, no rank of the site has taken anything. Collective over the new
  // groups, whose ranks need not be those of the old ones, and over the site. Throws as the constructor, except for
  // parameters' values, which may differ.
  void regroup(std::vector<std::shared_ptr<OpQueue>> stripes);

  // Parameters and buffers become θ̄; what was trained since the last outer step is given up. Collective over the site.
  void restore();

  // Parameters and buffers show θ̄, and nothing else changes: the caller puts back what was there. Collective over the
  // site.
  void showOuter();

  // Calls with every piece and buffer that this rank carries and its θ̄, fp32.
  void each(const std::function<void(const OuterParameter&, const at::Tensor& outer)>& call);

  // Options, and names and shapes of the whole parameters: equal at all sites.
  std::string agreed() const;

  // The stripes that this rank carries.
  const std::vector<int>& stripes() const { return model_->stripes(); }

  OuterReport report() const;
  int64_t steps() const { return clock_.steps; }

  // To be read by any thread.
  const OuterPlace& place() const { return place_; }

  // The contents of a checkpoint: tensors under the parameters' names, counters, and under "own.…" what is this rank's
  // alone. Waits for messages under way, so every rank of the group calls it after the same outer step; a run that
  // loads it (and its inner optimizer and parameters) goes on with the same bits. Where there are sites and the state
  // of one rank fails, all ranks of all sites throw PeerRefusal, which names it and says why; what has come there
  // stays, except in the site of a rank whose average failed, which drops the step. Where a rank is lost, some may have
  // theirs.
  TensorMap state();

  // Replaces state() on a rank that cannot write its checkpoint for a reason of its own: tells the other ranks.
  void stateFailed(const std::string& error);

  // Throws ValueError naming what is missing or does not fit, a number of ranks among it (not before the first
  // regroup() of one without a group); nothing has changed then.
  void load(const TensorMap& state);

 private:
  void agree(bool values);
  uint32_t checksum(size_t stripe) const;
  void outerStep(FragmentSchedule& fragment, bool waits);
  void waitForAverage(FragmentSchedule& fragment);
  void applyAverage(FragmentSchedule& fragment, Move move);
  void voteOnAverage(const FragmentSchedule& fragment, const EffectiveRanks& mine, const std::exception_ptr& error);
  void leaveGroups(Move move);
  void giveUp();
  void setRanks();
  void startCheck();
  OuterProgress progress() const;
  void goOnFrom(const OuterProgress& progress);
  TensorMap counters() const;

  const DiLoCoXOptions options_;
  DiLoCoXOptions buffer_options_;                 // of buffers: an exact mean
  std::vector<std::shared_ptr<OpQueue>> groups_;  // by stripe that this rank carries; empty before regroup()
  std::unique_ptr<SiteModel> model_, buffers_;
  std::unique_ptr<SiteVote> vote_;
  IntervalClock clock_;
  Adaptation adaptation_;
  Fragments fragments_;
  GroupHistory history_;
  OuterPlace place_;
  std::deque<std::pair<int64_t, Ticket>> checks_;  // by outer steps applied when each was queued
  OuterReport report_;
};

}  // namespace lowcomm
