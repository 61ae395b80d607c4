// When a fragment's pseudo-gradient is due: after a number of inner steps, or of seconds.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "diloco/diloco.h"
#include "tensor/gather_values.h"

namespace lowcomm {

// Returns which fragments are due after this inner step. With `sync_seconds` sites make different numbers of steps, but
// the ranks of a site must agree, so they use the first rank's clock, at inner steps that all of them know: each time
// when half of the rest has passed, and then at every step.
std::vector<bool> DiLoCoX::due() {
  std::vector<bool> due;
  for (const FragmentSchedule& s : fragments_)
    due.push_back(s.send_at <= steps_);  // the limit of steps, too
  if (options_.sync_seconds > 0 && (!site_.ranks || steps_ >= look_at_)) {
    std::vector<double> left;
    for (const FragmentSchedule& s : fragments_)
      left.push_back(-secondsSince(s.due));
    const double made = std::max<double>(1, static_cast<double>(steps_ - looked_at_));
    left.push_back(secondsSince(looked_) / made);  // seconds a step
    if (site_.ranks) left = firstRanksClock(std::move(left));
    const double a_step = std::max(left.back(), 1e-9);
    left.pop_back();
    for (size_t f = 0; f < due.size(); ++f)
      due[f] = due[f] || left[f] <= 0;
    const double nearest = std::max(0.0, *std::min_element(left.begin(), left.end()));
    looked_at_ = steps_;
    looked_ = Clock::now();
    look_at_ = steps_ + std::clamp<int64_t>(static_cast<int64_t>(nearest / a_step / 2), 1, options_.sync_every);
  }
  if (options_.sync_seconds > 0) keepNext(due);
  // Buffers go with the first fragment.
  if (fragments_.size() > of_parameters_) due.back() = due.front();
  return due;
}

// The ranks also compare the steps that they have counted: otherwise stripes of one model would have different weights.
std::vector<double> DiLoCoX::firstRanksClock(std::vector<double> left) {
  left.push_back(fragments_.front().samples);
  const std::vector<std::vector<double>> all = gatherNumbers(left, *site_.ranks, "DiLoCoX: compare clocks in a site");
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

// If several fragments are due, keeps only the one that has waited longest: otherwise a slow site would take two outer
// steps after one inner step, and could not stop between them as faster sites can.
void DiLoCoX::keepNext(std::vector<bool>& due) const {
  size_t next = due.size();
  for (size_t f = 0; f < of_parameters_; ++f) {
    if (due[f] && (next == due.size() || fragments_[f].send_at < fragments_[next].send_at)) next = f;
  }
  for (size_t f = 0; f < of_parameters_; ++f)
    due[f] = f == next;
}

// All fragments' intervals, spread evenly over one.
void DiLoCoX::startIntervals() {
  for (size_t f = 0; f < fragments_.size(); ++f) {
    const int64_t place = f < of_parameters_ ? static_cast<int64_t>(f) : 0;  // buffers go with the first
    const double share = static_cast<double>(place + 1) / static_cast<double>(options_.fragments);
    fragments_[f].send_at = steps_ + sync_every_ * (place + 1) / options_.fragments;
    fragments_[f].due = Clock::now() + ofSeconds(options_.sync_seconds * share);
  }
  look_at_ = 0;
}

void DiLoCoX::startInterval(FragmentSchedule& s) {
  s.send_at = steps_ + sync_every_;
  s.due = Clock::now() + ofSeconds(options_.sync_seconds);
}

// A fragment's part of the average, 0 for equal parts; counts again from here.
double DiLoCoX::weightOf(FragmentSchedule& s) const {
  const double samples = std::exchange(s.samples, 0);
  s.sent_samples += samples;
  return options_.sync_seconds > 0 ? samples : 0;
}

}  // namespace lowcomm
