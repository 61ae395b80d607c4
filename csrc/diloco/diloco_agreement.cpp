// The agreements of an outer loop inside a site, in addition to the average: at every outer step, how the averages of
// all ranks came out, and which rank and interval follow; and when a checkpoint is written.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <c10/util/Exception.h>

#include "base/error.h"
#include "collective/collectives.h"
#include "collective/context.h"
#include "diloco/diloco.h"
#include "tensor/gather_values.h"

namespace lowcomm {
namespace {

// A rank without an average gives one of these in place of its number; the reason is agreed on after that.
constexpr double kFailed = std::numeric_limits<double>::quiet_NaN();  // ValueError
constexpr double kLost = std::numeric_limits<double>::infinity();     // PeerError: a peer or the network
// A rank that still waits for a stripe says so, and all ask again: others that have none would give it up.
constexpr double kNotYet = -1;

// Whether a peer or the network was lost, now (PeerError) or before (c10's, of a group that has ended).
bool isLost(const std::exception_ptr& error) {
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
  KeyValues description;
  description.fields = {error.empty()
                            ? std::pair<std::string, std::string>("step", std::to_string(step))
                            : std::pair<std::string, std::string>("error", beginningOf(error, kMaxErrorText))};
  return Ticket(queue, op, 1, [description](OpContext& context) { agree(context, description); });
}

constexpr const char* kStep = "DiLoCoX outer step";
constexpr const char* kState = "DiLoCoX state";

// Throws where another rank of the site has said that it failed: PeerError where any lost a peer, else ValueError.
[[noreturn]] void throwOthers(OpQueue& site, const std::vector<double>& words, int64_t step) {
  try {
    tell(site, kStep, "", step).wait();
  } catch (const PeerRefusal& told) {
    const std::string what =
        std::string(
            "DiLoCoX: expected an average on every rank of the site, got an error of another one's; the outer step was "
            "dropped here, too: ") +
        told.what();
    if (std::any_of(words.begin(), words.end(), [](double one) { return std::isinf(one); })) throw PeerError(what);
    throw ValueError(what);
  }
  throw ValueError("DiLoCoX: expected the reason of another rank's error, got none");
}

}  // namespace

std::string DiLoCoX::reasonOf(const std::exception_ptr& error) {
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

void DiLoCoX::refuse(const std::string& error, const std::vector<std::shared_ptr<OpQueue>>& stripes,
                     const OuterSite& site) {
  if (site.ranks) SiteModel({}, site, 0, 0, false, error);
  tellStripes(error, stripes);
}

// Returns when all others have been told.
void DiLoCoX::tellStripes(const std::string& error, const std::vector<std::shared_ptr<OpQueue>>& stripes) {
  KeyValues description;
  description.fields = {{"error", error.substr(0, 1000)}};
  for (const std::shared_ptr<OpQueue>& stripe : stripes) {
    try {
      Ticket(*stripe, "DiLoCoX", 1, [&](OpContext& op) { lowcomm::agree(op, description); }).wait();
    } catch (const PeerError&) {
      // It names this rank's own error, or a peer that is lost, and this rank throws its own in any case.
    }
  }
}

bool DiLoCoX::agreesInSite() const {
  return site_.ranks && options_.adapt_sync_every;
}

// Every rank's word and effective ranks, once no rank says kNotYet; of a rank that says so itself, as they are.
std::vector<std::vector<double>> DiLoCoX::gatherVotes(double mine, const EffectiveRanks& effective) {
  std::vector<std::vector<double>> all;
  do {
    all = gatherNumbers({mine, effective.sum, effective.matrices}, *site_.ranks, kStep);
    word_due_ = Clock::now() + std::chrono::milliseconds(site_.ranks->group().timeout_ms / 4);
  } while (mine != kNotYet && std::any_of(all.begin(), all.end(), [](const auto& one) { return one[0] == kNotYet; }));
  return all;
}

// Unless what this rank waits for ends before its next word is due, it says kNotYet.
bool DiLoCoX::votesToWait(const std::function<bool(std::chrono::milliseconds)>& endsWithin) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(word_due_ - Clock::now());
  if (endsWithin(std::max(left, std::chrono::milliseconds(0)))) return false;
  gatherVotes(kNotYet, {});
  return true;
}

// The effective ranks of all averages of this rank's part of the model, once every rank of the site has its averages.
// Throws `error` where there is one, or what another rank had.
EffectiveRanks DiLoCoX::agreeOnAverage(const EffectiveRanks& mine, const std::exception_ptr& error) {
  if (!site_.ranks) {
    if (error) std::rethrow_exception(error);
    return mine;
  }
  const double word = !error ? 0 : isLost(error) ? kLost : kFailed;
  std::vector<double> words;
  EffectiveRanks all;
  try {
    const auto told = gatherVotes(word, mine);
    for (size_t rank = 0; rank < told.size(); ++rank) {
      words.push_back(told[rank][0]);
      if (!model_->isOfPart(static_cast<int>(rank))) continue;
      all.sum += told[rank][1];
      all.matrices += told[rank][2];
    }
    if (error) tell(*site_.ranks, kStep, reasonOf(error), steps_).wait();
  } catch (...) {
    if (error) std::rethrow_exception(error);  // the rank's own comes first
    throw;
  }
  if (std::any_of(words.begin(), words.end(), [](double one) { return one != 0; }))
    throwOthers(*site_.ranks, words, steps_);
  return all;
}

// An error that this rank meets between two agreements is kept for the next one, so that all ranks of the site throw it
// at the same place; without a site it is thrown at once.
void DiLoCoX::keepError(const std::function<void()>& f) {
  if (!site_.ranks) return f();
  try {
    f();
  } catch (...) {
    if (!kept_error_) kept_error_ = std::current_exception();
  }
}

void DiLoCoX::agreeOnErrors() {
  if (site_.ranks) agreeOnAverage({}, std::exchange(kept_error_, nullptr));
}

// An outer step's averages have come, or (`mine` empty, no error) it had none here: then the others of the site may
// have some, as after an error of this rank alone, and wait for its word. So every outer step has one.
void DiLoCoX::voteOnAverage(const FragmentSchedule& s, const EffectiveRanks& mine, const std::exception_ptr& error) {
  const EffectiveRanks all = agreeOnAverage(mine, error ? error : std::exchange(kept_error_, nullptr));
  if (s.buffers || !(options_.adapt_rank || options_.adapt_sync_every)) return;
  // Vectors alone have none, and say nothing of the matrices'.
  if (all.matrices > 0) {
    adaptation_.add(all.mean());
    report_.effective_rank = all.mean();
    rank_ = adaptation_.rank();
  }
  adapt();
}

// The mean of every rank's r_t, the same on all: added in rank order.
double DiLoCoX::rankInSite() {
  const std::vector<double> all = gatherNumber(rank_, *site_.ranks, kStep);
  double sum = 0;
  for (double one : all)
    sum += one;
  return sum / static_cast<double>(all.size());
}

void DiLoCoX::adapt() {
  // Parts of a model see other averages: without one interval for all of them a stage would wait for ever.
  const double agreed = agreesInSite() ? rankInSite() : rank_;
  sync_every_ = adaptation_.syncEvery(agreed);
  setRanks();
}

void DiLoCoX::setRanks() {
  if (!options_.adapt_rank) return;  // r_t may still set the interval
  for (FragmentSchedule& s : fragments_) {
    for (Fragment& stripe : s.stripes)
      stripe.setRank(std::llround(rank_));
  }
}

// Whether a rank of the site has lost an average under way: then all of them drop what they have of that outer step, as
// a rank that had none would make the next one in another order than the others.
bool DiLoCoX::isLostInSite(bool mine) {
  if (!site_.ranks) return mine;
  const auto all = gatherVotes(mine ? kLost : 0, {});
  return std::any_of(all.begin(), all.end(), [](const auto& one) { return one[0] != 0; });
}

// First among those that average with this rank, then in its site: so everybody hears of it.
void DiLoCoX::agreeOnState(std::string error) {
  if (!site_.ranks) return;
  std::exception_ptr told;
  std::vector<std::shared_ptr<OpQueue>> queues = groups_;
  queues.push_back(site_.ranks);
  for (const std::shared_ptr<OpQueue>& queue : queues) {
    try {
      if (queue == site_.ranks) gatherVotes(0, {});
      Ticket op = tell(*queue, kState, error, report_.outer_steps);  // sites may have made other numbers of inner ones
      queue == site_.ranks ? void(op.wait()) : awaitInSite(op);
    } catch (const std::exception& caught) {
      if (!error.empty()) continue;
      error = caught.what();
      told = std::current_exception();
    }
  }
  if (told) std::rethrow_exception(told);
}

void DiLoCoX::stateFailed(const std::string& error) {
  if (isLostInSite(awaitAll() != nullptr)) giveUp();
  agreeOnState(error.empty() ? "no reason was given" : error);
}

}  // namespace lowcomm
