#include "diloco/site_vote.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <c10/util/Exception.h>

#include "base/error.h"
#include "collective/collectives.h"
#include "collective/context.h"
#include "engine/op_queue.h"

namespace lowcomm {
namespace {

// The vote of a rank without an average; the reason is agreed on after that.
constexpr double kFailed = std::numeric_limits<double>::quiet_NaN();  // ValueError
constexpr double kLost = std::numeric_limits<double>::infinity();     // PeerError: a peer or the network
// The vote of a rank that still waits for a stripe: all vote again, or those without a stripe would give it up.
constexpr double kNotYet = -1;

// Whether a peer or the network was lost, now (PeerError) or before (c10's, of a group that has ended).
bool isLostPeer(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerError&) {
    return true;
  } catch (const c10::DistError&) {
    return true;
  } catch (...) {
    return false;
  }
}

// Compares a field, or tells an error in its place. It throws PeerRefusal where any rank has an error, this one too.
Ticket tell(OpQueue& queue, const std::string& op, const std::string& error, int64_t step) {
  KeyValues description{{error.empty()
                             ? std::pair<std::string, std::string>("step", std::to_string(step))
                             : std::pair<std::string, std::string>("error", beginningOf(error, kMaxErrorText))}};
  return Ticket(queue, op, 1, [description](OpContext& context) { agree(context, description); });
}

constexpr const char* kStep = "DiLoCoX outer step";
constexpr const char* kState = "DiLoCoX state";

// Throws the error of another rank that voted so: PeerError where any lost a peer, else ValueError.
[[noreturn]] void throwOthers(OpQueue& site, const std::vector<double>& votes, int64_t step) {
  try {
    tell(site, kStep, "", step).wait();
  } catch (const PeerRefusal& told) {
    const std::string what =
        std::string(
            "DiLoCoX: expected an average on every rank of the site, got an error of another one's; the outer step was "
            "dropped here, too: ") +
        told.what();
    if (std::any_of(votes.begin(), votes.end(), [](double one) { return std::isinf(one); })) throw PeerError(what);
    throw ValueError(what);
  }
  throw ValueError("DiLoCoX: expected the reason of another rank's error, got none");
}

}  // namespace

std::string reasonOf(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& caught) {
    return caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    return caught.what();
  } catch (...) {
    return "an unknown error";
  }
}

// Every rank's vote and effective ranks, once no rank votes kNotYet; at once for a rank that votes so itself.
std::vector<std::vector<double>> SiteVote::gatherVotes(double mine, const EffectiveRanks& effective) {
  std::vector<std::vector<double>> all;
  do {
    all = gatherNumbers({mine, effective.sum, effective.matrices}, *ranks_, kStep);
    vote_due_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(ranks_->group().timeout_ms / 4);
  } while (mine != kNotYet && std::any_of(all.begin(), all.end(), [](const auto& one) { return one[0] == kNotYet; }));
  return all;
}

// Votes kNotYet unless what this rank waits for ends before its next vote is due.
bool SiteVote::votesToWait(const std::function<bool(std::chrono::milliseconds)>& endsWithin) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(vote_due_ - std::chrono::steady_clock::now());
  if (endsWithin(std::max(left, std::chrono::milliseconds(0)))) return false;
  gatherVotes(kNotYet, {});
  return true;
}

EffectiveRanks SiteVote::onAverage(const EffectiveRanks& mine, std::exception_ptr error, int64_t step) {
  if (kept_error_) error = std::exchange(kept_error_, nullptr);  // it came first
  if (!ranks_) {
    if (error) std::rethrow_exception(error);
    return mine;
  }
  std::vector<double> votes;
  EffectiveRanks all;
  try {
    const auto given = gatherVotes(!error ? 0 : isLostPeer(error) ? kLost : kFailed, mine);
    for (size_t rank = 0; rank < given.size(); ++rank) {
      votes.push_back(given[rank][0]);
      if (!model_.isOfPart(static_cast<int>(rank))) continue;
      all.sum += given[rank][1];
      all.matrices += given[rank][2];
    }
    if (error) tell(*ranks_, kStep, reasonOf(error), step).wait();
  } catch (...) {
    if (error) std::rethrow_exception(error);  // the rank's own comes first
    throw;
  }
  if (std::any_of(votes.begin(), votes.end(), [](double one) { return one != 0; })) throwOthers(*ranks_, votes, step);
  return all;
}

void SiteVote::onErrors(int64_t step) {
  onAverage({}, nullptr, step);
}

void SiteVote::keepError(const std::function<void()>& f) {
  try {
    f();
  } catch (...) {
    if (!kept_error_) kept_error_ = std::current_exception();
  }
}

double SiteVote::mean(double mine) {
  if (!ranks_) return mine;
  const std::vector<double> all = gatherNumber(mine, *ranks_, kStep);
  double sum = 0;
  for (double one : all)
    sum += one;
  return sum / static_cast<double>(all.size());
}

bool SiteVote::isLost(bool mine) {
  if (!ranks_) return mine;
  const auto all = gatherVotes(mine ? kLost : 0, {});
  return std::any_of(all.begin(), all.end(), [](const auto& one) { return one[0] != 0; });
}

void SiteVote::onState(const std::vector<std::shared_ptr<OpQueue>>& groups, const std::string& own_error,
                       int64_t outer_steps) {
  if (!ranks_) return;
  std::string error = own_error;
  std::exception_ptr told;
  std::vector<std::shared_ptr<OpQueue>> queues = groups;
  queues.push_back(ranks_);
  for (const std::shared_ptr<OpQueue>& queue : queues) {
    try {
      if (queue == ranks_) gatherVotes(0, {});
      Ticket op = tell(*queue, kState, error, outer_steps);  // sites may have made other numbers of inner steps
      queue == ranks_ ? void(op.wait()) : await(op);
    } catch (const std::exception& caught) {
      if (!error.empty()) continue;
      error = caught.what();
      told = std::current_exception();
    }
  }
  if (told) std::rethrow_exception(told);
}

}  // namespace lowcomm
