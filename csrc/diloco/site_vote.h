#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "diloco/fragment.h"
#include "diloco/site_model.h"
#include "engine/op_queue.h"

namespace lowcomm {

// The ranks of a site vote on three things: at every outer step whether the averages of all ranks succeeded, whether a
// checkpoint is written, and whether all ranks keep waiting because one of them does. Every function is collective over
// the site unless its comment says otherwise; a rank without a site votes alone. One thread.
class SiteVote {
 public:
  // `ranks`: null for a rank alone. `model` outlives this.
  SiteVote(std::shared_ptr<OpQueue> ranks, const SiteModel& model) : ranks_(std::move(ranks)), model_(model) {}

  const std::shared_ptr<OpQueue>& ranks() const { return ranks_; }

  // Waits for a stripe's op or average while the other ranks of the site are told that this one still waits. Votes come
  // on all ranks of the site before any other op of it. What the op refers to must outlive this call, which may throw
  // before the op has ended.
  template <class Op>
  void await(Op& op) {
    while (ranks_ && votesToWait([&](std::chrono::milliseconds patience) { return op.endsWithin(patience); })) {
    }
    op.wait();
  }

  // Votes on the averages of outer step `step` (a number for error messages), once every rank of the site has its own.
  // Returns the effective ranks of all averages of this rank's part of the model. Throws `error` or the one that was
  // kept, else PeerError or ValueError for another rank's.
  EffectiveRanks onAverage(const EffectiveRanks& mine, std::exception_ptr error, int64_t step);

  // Votes on the errors that were kept: throws as onAverage.
  void onErrors(int64_t step);

  // Runs f. An error is kept for the next vote, so that all ranks of a site throw it at the same place. Not collective.
  void keepError(const std::function<void()>& f);
  void forgetError() { kept_error_ = nullptr; }

  // The mean of every rank's number: the same bits on all ranks, as they are added in rank order.
  double mean(double mine);

  // Whether any rank of the site has lost an average under way: then all of them drop that outer step, as a rank that
  // had none would make the next one in another order than the others.
  bool isLost(bool mine);

  // Votes on a checkpoint, among the ranks that average with this one (`groups`) and then in the site, so that every
  // rank of every site learns of an error. Throws PeerRefusal where another rank has one.
  void onState(const std::vector<std::shared_ptr<OpQueue>>& groups, const std::string& error, int64_t outer_steps);

 private:
  std::vector<std::vector<double>> gatherVotes(double mine, const EffectiveRanks& effective);
  bool votesToWait(const std::function<bool(std::chrono::milliseconds)>& endsWithin);

  const std::shared_ptr<OpQueue> ranks_;
  const SiteModel& model_;
  std::chrono::steady_clock::time_point vote_due_ = {};  // of a rank that still waits for a stripe
  std::exception_ptr kept_error_;                        // of this rank, which its site has not learned of yet
};

// The text of an error, without a backtrace.
std::string reasonOf(const std::exception_ptr& error);

}  // namespace lowcomm
