// An outer loop goes on in other groups: sites that are behind take the outer state and the progress of those ahead.
#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <utility>

#include "base/error.h"
#include "collective/collectives.h"
#include "diloco/diloco.h"
#include "diloco/handover.h"
#include "engine/op_queue.h"

namespace lowcomm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kCounters = 5;  // of numbersOf(), in front of the fragments'

// All but the effective ranks, which are of any number.
std::vector<double> numbersOf(const OuterProgress& p) {
  std::vector<double> numbers = {static_cast<double>(p.steps), static_cast<double>(p.applied),
                                 static_cast<double>(p.sync_every), static_cast<double>(p.outer_steps), p.step_s};
  numbers.insert(numbers.end(), p.sent.begin(), p.sent.end());
  return numbers;
}

OuterProgress progressOf(const std::vector<double>& numbers, size_t fragments, std::vector<double> effective_ranks) {
  const auto number = [&](size_t i) { return static_cast<int64_t>(numbers[i]); };
  OuterProgress p{number(0), number(1), number(2), number(3), numbers[4], {}, std::move(effective_ranks)};
  for (size_t f = 0; f < fragments; ++f)
    p.sent.push_back(number(kCounters + f));
  return p;
}

// All ranks of a stripe take the progress of `root`, the first of those ahead, whose progress the others ahead have.
OuterProgress takenFrom(OpQueue& group, int root, const OuterProgress& mine) {
  const auto numbers = gatherNumbers(numbersOf(mine), group, "DiLoCoX: compare the schedule")[root];
  std::vector<double> effective = mine.effective_ranks;
  const auto known = gatherNumber(static_cast<double>(effective.size()), group, "DiLoCoX: compare effective ranks");
  effective.resize(static_cast<size_t>(known[root]));
  if (!effective.empty()) {
    std::vector<BroadcastMessage> messages = {{effective.size(), CodecSpec{}, DType::float64, effective.data(), {}}};
    Ticket(group, "DiLoCoX: take over effective ranks", 1, [&](OpContext& op) {
      broadcast(op, messages, root);
    }).wait();
  }
  OuterProgress taken = progressOf(numbers, mine.sent.size(), std::move(effective));
  if (taken.step_s == 0) taken.step_s = mine.step_s;
  return taken;
}

// The state of one rank at the end of a regroup. agreeInSite() turns the states of a site's ranks into one.
struct Arrival {
  OuterProgress progress;
  bool carries;   // a stripe: then the progress is that of its group
  bool behind;    // this rank is; after agreeInSite() any rank of the site is
  double late_s;  // since this rank stopped waiting for other sites; after agreeInSite() the first rank's
};

// A rank that carries no stripe takes the progress of a rank that carries one of its part of the model.
Arrival agreeInSite(OpQueue& site, const SiteModel& model, Arrival arrival) {
  OuterProgress& mine = arrival.progress;
  const size_t fragments = mine.sent.size(), numbers = kCounters + fragments;
  std::vector<double> given = numbersOf(mine), effective = mine.effective_ranks;
  given.insert(given.end(), {static_cast<double>(effective.size()), arrival.carries ? 1. : 0., arrival.late_s,
                             arrival.behind ? 1. : 0.});
  const auto all = gatherNumbers(given, site, "DiLoCoX: compare the schedule in a site");
  double step_s = 0;
  size_t most = 0;
  for (const std::vector<double>& one : all) {
    arrival.behind = arrival.behind || one.back() == 1;
    most = std::max(most, static_cast<size_t>(one[numbers]));
    step_s = std::max(step_s, one[kCounters - 1]);
  }
  arrival.late_s = all[0][numbers + 2];
  effective.resize(most);
  std::vector<std::vector<double>> known(all.size());
  if (most > 0) known = gatherNumbers(effective, site, "DiLoCoX: compare effective ranks in a site");
  for (size_t rank = 0; rank < all.size() && !arrival.carries; ++rank) {
    if (all[rank][numbers + 1] != 1 || !model.isOfPart(static_cast<int>(rank))) continue;
    known[rank].resize(static_cast<size_t>(all[rank][numbers]));
    mine = progressOf(all[rank], fragments, known[rank]);
  }
  mine.step_s = step_s;
  return arrival;
}

}  // namespace

// Drops the messages under way. Training since then stays in the parameters, and counts from θ̄ again, as its samples
// do.
void DiLoCoX::giveUp() {
  for (FragmentSchedule& s : fragments_) {
    for (Fragment& stripe : s.stripes)
      stripe.drop();
    if (s.under_way) s.trained += std::exchange(s.sent_trained, {});
    s.under_way = false;
    s.apply_at = -1;
    if (s.send_at > clock_.steps) continue;
    history_.broke_off = true;
    clock_.start(s);
  }
  // With an interval by the clock, sites could disagree about the next fragment: some ended this interval by their
  // limit of steps.
  if (options_.sync_seconds > 0) clock_.startAll(fragments_);
  checks_.clear();
  vote_->forgetError();
}

// Applies what is under way, and waits until every rank has: a rank that closed its connections before would take from
// the others what they have not read yet.
void DiLoCoX::leaveGroups(Move move) {
  const Meeting meeting(place_);
  std::optional<Awaiting> awaiting;
  try {
    for (FragmentSchedule& s : fragments_) {
      if (s.under_way) {
        s.model.collect(s.number);
        waitForAverage(s);
        applyAverage(s, move);
      } else if (options_.mode != OuterMode::sync) {
        voteOnAverage(s, {}, nullptr);
      }
    }
    awaiting.emplace(place_, place_.begun);
    for (; !checks_.empty(); checks_.pop_front())
      vote_->keepError([&] { vote_->await(checks_.front().second); });
    vote_->onErrors(clock_.steps);
  } catch (...) {
    giveUp();
    throw;
  }
  KeyValues description{{{"outer step", std::to_string(history_.applied)}}};
  for (const std::shared_ptr<OpQueue>& group : groups_) {
    vote_->keepError([&] {
      Ticket op(*group, "DiLoCoX: leaving the group", 1,
                [description](OpContext& context) { lowcomm::agree(context, description); });
      vote_->await(op);
    });
  }
  vote_->onErrors(clock_.steps);
}

void DiLoCoX::quiesce() {
  leaveGroups(Move::keeping);
}

void DiLoCoX::finish(bool sends) {
  try {
    for (FragmentSchedule& s : fragments_) {
      if (!sends || options_.mode == OuterMode::sync) break;  // mode sync has no message under way here
      s.model.collect(s.number);
      outerStep(s, /*waits=*/true);
    }
  } catch (...) {
    giveUp();
    throw;
  }
  leaveGroups(Move::whole);
  restore();
}

OuterProgress DiLoCoX::progress() const {
  OuterProgress p{clock_.steps,
                  history_.applied,
                  clock_.sync_every,
                  report_.outer_steps,
                  clock_.step_s,
                  {},
                  adaptation_.effectiveRanks()};
  for (const FragmentSchedule& s : fragments_)
    p.sent.push_back(s.sent);
  return p;
}

void DiLoCoX::goOnFrom(const OuterProgress& p) {
  clock_.steps = p.steps;
  clock_.sync_every = p.sync_every;
  clock_.step_s = p.step_s;
  history_.applied = p.applied;
  report_.outer_steps = p.outer_steps;
  for (size_t f = 0; f < fragments_.size(); ++f)
    fragments_[f].sent = p.sent[f];
  adaptation_.set(p.effective_ranks);
  setRanks();
}

void DiLoCoX::regroup(std::vector<std::shared_ptr<OpQueue>> stripes) {
  if (stripes.size() != model_->stripes().size()) {
    throw ValueError(c10::str("DiLoCoX: regroup: expected a group for each of the ", model_->stripes().size(),
                              " stripes of this rank, got ", stripes.size()));
  }
  giveUp();
  history_.leave();
  groups_ = std::move(stripes);
  history_.join(groups_);
  place_.begun = std::numeric_limits<int64_t>::max();  // it is late for nothing while it takes over
  // The site's training goes to the stripes first: spread() below is of all ranks or of none.
  for (FragmentSchedule& s : fragments_)
    s.model.collect(s.number);
  const OuterProgress before = progress();
  const auto start = Clock::now();
  auto waited_until = start;
  bool behind = false, anyone_behind = false, keeps = options_.quorum > 0;
  bool hastens = std::exchange(history_.broke_off, false);
  std::vector<Handover> handovers;
  std::exception_ptr error;
  try {
    agree(/*values=*/false);
    std::vector<StripeRanks> ranks;
    for (size_t stripe = 0; stripe < groups_.size(); ++stripe) {
      ranks.push_back(StripeRanks::compare(*groups_[stripe], history_.applied, checksum(stripe)));
      behind = behind || ranks[stripe].isBehind(groups_[stripe]->rank());
      anyone_behind = anyone_behind || !ranks[stripe].behind.empty();
      if (options_.quorum == 0) continue;
      for (const double other : gatherNumber(hastens ? 1 : 0, *groups_[stripe], "DiLoCoX: compare how groups ended"))
        hastens = hastens || other == 1;
      if (!ranks[stripe].behind.empty()) keeps = history_.isUncounted(stripe, *groups_[stripe], ranks[stripe]) && keeps;
    }
    for (size_t stripe = 0; stripe < groups_.size(); ++stripe)
      goOnFrom(takenFrom(*groups_[stripe], ranks[stripe].ahead[0], progress()));
    waited_until = Clock::now();  // from here on the sites that are ahead wait for no other one
    for (size_t stripe = 0; stripe < groups_.size(); ++stripe) {
      for (size_t f = 0; f < fragments_.size() && !ranks[stripe].behind.empty(); ++f)
        handovers.emplace_back(*groups_[stripe], ranks[stripe], fragments_[f].stripes[stripe]);
    }
    for (Handover& one : handovers) {
      if (one.takes()) vote_->await(one.op());
    }
  } catch (...) {
    error = std::current_exception();
  }
  try {
    vote_->onAverage({}, error, clock_.steps);
  } catch (...) {  // no rank of the site has written anything yet
    for (FragmentSchedule& s : fragments_)
      std::for_each(s.stripes.begin(), s.stripes.end(), [](Fragment& stripe) { stripe.unshare(); });
    goOnFrom(before);
    throw;
  }
  if (options_.quorum > 0) {
    keeps = vote_->mean(keeps ? 1 : 0) == 1;
    anyone_behind = vote_->mean(anyone_behind ? 1 : 0) > 0;
    hastens = vote_->mean(hastens ? 1 : 0) > 0;
  }
  report_.taken_bytes = 0;
  for (size_t i = 0; i < handovers.size(); ++i)
    report_.taken_bytes += handovers[i].finish(keeps && !fragments_[i % fragments_.size()].buffers);
  if (behind) history_.forget();
  report_.taken_s = secondsSince(start);
  Arrival arrival{progress(), !groups_.empty(), behind, secondsSince(waited_until)};
  if (vote_->ranks()) arrival = agreeInSite(*vote_->ranks(), *model_, std::move(arrival));
  goOnFrom(arrival.progress);
  clock_.startAll(fragments_);
  // A group that goes on without a late site takes the outer step that it was late for.
  if (options_.quorum > 0 && hastens && !anyone_behind) clock_.hasten(fragments_);
  if (arrival.behind) {
    for (FragmentSchedule& s : fragments_) {
      s.model.spread(s.number);
      if (!s.buffers)
        (keeps ? report_.late_samples : report_.dropped_samples) += s.trained.samples / options_.fragments;
      if (!keeps) s.trained = {};
    }
    clock_.leaveOut(fragments_, arrival.late_s);
  }
  clock_.resume();
  place_.begun = 0;
  history_.formed = true;
  history_.takePart();
  if (!groups_.empty()) report_.participating = groups_[0]->size();
}

}  // namespace lowcomm
