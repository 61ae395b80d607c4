#include "diloco/interval_clock.h"

#include <algorithm>

#include <c10/util/StringUtil.h>

#include "base/error.h"
#include "engine/op_queue.h"

namespace lowcomm {
namespace {

using Clock = std::chrono::steady_clock;

Clock::duration ofSeconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// If several fragments are due, keeps only the one that has waited longest: otherwise a slow site would take two outer
// steps after one inner step, and could not stop between them as faster sites can.
void keepNext(const Fragments& fragments, std::vector<bool>& due) {
  size_t next = due.size();
  for (size_t f = 0; f < due.size(); ++f) {
    if (fragments[f].buffers || !due[f]) continue;
    if (next == due.size() || fragments[f].send_at < fragments[next].send_at) next = f;
  }
  for (size_t f = 0; f < due.size(); ++f)
    due[f] = f == next;
}

}  // namespace

void IntervalClock::stepMade() {
  ++steps;
  const auto ended = std::exchange(step_ended_, {});
  if (ended == Clock::time_point()) return;
  const double seconds = secondsSince(ended);
  step_s = step_s == 0 ? seconds : .9 * step_s + .1 * std::min(seconds, 2 * step_s);
}

std::vector<bool> IntervalClock::due(const Fragments& fragments) {
  std::vector<bool> due;
  for (const FragmentSchedule& s : fragments)
    due.push_back(s.send_at <= steps);
  if (options_.sync_seconds > 0) {
    if (!site_ || steps >= look_at_) readClock(fragments, due);
    keepNext(fragments, due);
  }
  if (fragments.back().buffers) due.back() = due.front();  // buffers go with the first fragment
  return due;
}

// Sites make different numbers of steps, but the ranks of a site must agree: they use the first rank's clock, at inner
// steps that all of them know, each time when half of the rest has passed, and then at every step.
void IntervalClock::readClock(const Fragments& fragments, std::vector<bool>& due) {
  std::vector<double> left;
  for (const FragmentSchedule& s : fragments)
    left.push_back(-secondsSince(s.due));
  const double made = std::max<double>(1, static_cast<double>(steps - looked_at_));
  left.push_back(secondsSince(looked_) / made);  // seconds a step
  if (site_) left = firstRanksClock(std::move(left), fragments.front().trained.samples);
  const double a_step = std::max(left.back(), 1e-9);
  left.pop_back();
  for (size_t f = 0; f < due.size(); ++f)
    due[f] = due[f] || left[f] <= 0;
  const double nearest = std::max(0.0, *std::min_element(left.begin(), left.end()));
  looked_at_ = steps;
  looked_ = Clock::now();
  look_at_ = steps + std::clamp<int64_t>(static_cast<int64_t>(nearest / a_step / 2), 1, options_.sync_every);
}

// The ranks also compare the samples that they have counted: otherwise stripes of one model would have different
// weights.
std::vector<double> IntervalClock::firstRanksClock(std::vector<double> left, double samples) const {
  left.push_back(samples);
  const std::vector<std::vector<double>> all = gatherNumbers(left, *site_, "DiLoCoX: compare clocks in a site");
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank].back() == all[0].back()) continue;
    throw ValueError(
        c10::str("DiLoCoX: step: samples: expected the same number on all ranks of a site, that of the "
                 "whole site, got ",
                 all[0].back(), " of rank 0 and ", all[rank].back(), " of rank ", rank, " since the last interval"));
  }
  left = all[0];
  left.pop_back();
  return left;
}

void IntervalClock::start(FragmentSchedule& s) const {
  s.send_at = steps + sync_every;
  s.due = Clock::now() + ofSeconds(options_.sync_seconds);
}

void IntervalClock::startAll(Fragments& fragments) {
  for (size_t f = 0; f < fragments.size(); ++f) {
    FragmentSchedule& s = fragments[f];
    const int64_t place = s.buffers ? 1 : static_cast<int64_t>(f) + 1;
    const double share = static_cast<double>(place) / static_cast<double>(options_.fragments);
    s.send_at = steps + sync_every * place / options_.fragments;
    s.due = Clock::now() + ofSeconds(options_.sync_seconds * share);
  }
  look_at_ = 0;
}

void IntervalClock::hasten(Fragments& fragments) const {
  const int64_t earlier = fragments.front().send_at - steps - 1;
  for (FragmentSchedule& s : fragments)
    s.send_at -= earlier;
}

void IntervalClock::leaveOut(Fragments& fragments, double late_s) {
  int64_t next = fragments.front().send_at;
  for (FragmentSchedule& s : fragments) {
    next = std::min(next, s.send_at);
    s.due -= ofSeconds(late_s);
  }
  const double made = step_s > 0 ? late_s / step_s : 0;
  steps += static_cast<int64_t>(std::min(made, std::max(0., static_cast<double>(next - 1 - steps))));
}

}  // namespace lowcomm
