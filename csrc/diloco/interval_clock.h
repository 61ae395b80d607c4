#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "diloco/diloco_options.h"
#include "diloco/fragment.h"
#include "diloco/site_model.h"
#include "engine/op_queue.h"

namespace lowcomm {

inline double secondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// An amount of training of a site.
struct Trained {
  double samples = 0, steps = 0;  // samples of the whole site; inner steps

  void operator+=(const Trained& more) { samples += more.samples, steps += more.steps; }
};

// A fragment of a site's model on one of its ranks: the stripes of it that the rank carries, and when it is averaged.
struct FragmentSchedule {
  FragmentSchedule(SiteModel& model, const DiLoCoXOptions& options, int64_t number, bool buffers)
      : model(model), number(number), buffers(buffers) {
    for (size_t stripe = 0; stripe < model.stripes().size(); ++stripe)
      stripes.emplace_back(options, model.pieces(stripe, number));
  }

  SiteModel& model;
  const int64_t number;                // in the model
  const bool buffers;                  // averaged exactly, with the first fragment of the parameters
  std::vector<Fragment> stripes;       // by stripe that this rank carries
  int64_t send_at = 0, apply_at = -1;  // inner steps
  int64_t sent = 0;                    // outer steps
  bool under_way = false;
  std::chrono::steady_clock::time_point due = {};  // with sync_seconds
  Trained trained;                                 // since the last pseudo-gradient
  Trained sent_trained;                            // in pseudo-gradients whose average is not applied yet
  int64_t message = 0;                             // OuterPlace::begun when the last pseudo-gradient was sent
};

// The parameters' fragments, and behind them at most one of buffers.
using Fragments = std::deque<FragmentSchedule>;

// Decides after which inner steps a fragment's pseudo-gradient is due: after `sync_every` steps, or with sync_seconds
// after so many seconds, and `sync_every` steps at the latest. One thread.
class IntervalClock {
 public:
  // `options` outlives this. `site`: the ranks of the site; null: this rank alone.
  IntervalClock(const DiLoCoXOptions& options, std::shared_ptr<OpQueue> site)
      : sync_every(options.sync_every), options_(options), site_(std::move(site)) {}

  int64_t steps = 0;   // inner steps so far
  int64_t sync_every;  // H_t

  // Seconds of an inner step, including everything between two calls of step(): a running mean of the last ones. A
  // pause after the first step, such as an evaluation, counts as two steps.
  double step_s = 0;

  // Called when an inner step has been made, and when the loop has dealt with it.
  void stepMade();
  void stepEnds() { step_ended_ = Clock::now(); }

  // The loop goes on from another state: clocks are compared at the next step, and the time until then is no step's.
  void resume() { look_at_ = 0, step_ended_ = {}; }

  // Returns which fragments are due after this inner step. Collective over the site with sync_seconds. Throws
  // ValueError where the site's ranks have counted different samples.
  std::vector<bool> due(const Fragments& fragments);

  // Starts the interval of one fragment; of all, spread evenly over one interval.
  void start(FragmentSchedule& fragment) const;
  void startAll(Fragments& fragments);

  // Ends all intervals that startAll() began so much earlier that the first ends with the next inner step.
  void hasten(Fragments& fragments) const;

  // Counts the inner steps that other sites have made in the last `late_s` seconds, but for the one before the next
  // pseudo-gradient: so they need not wait until this site has made them all.
  void leaveOut(Fragments& fragments, double late_s);

 private:
  using Clock = std::chrono::steady_clock;
  void readClock(const Fragments& fragments, std::vector<bool>& due);
  std::vector<double> firstRanksClock(std::vector<double> left, double samples) const;

  const DiLoCoXOptions& options_;
  const std::shared_ptr<OpQueue> site_;
  int64_t look_at_ = 0, looked_at_ = 0;  // inner steps at which the ranks of a site compare their clocks
  Clock::time_point looked_ = {}, step_ended_ = {};
};

}  // namespace lowcomm
