#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <vector>

#include "diloco/fragment.h"
#include "diloco/site_model.h"

namespace lowcomm {

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
  double samples = 0;                              // of the site, since its last pseudo-gradient
  double sent_samples = 0;                         // in pseudo-gradients whose average is not applied yet
};

// The parameters' fragments, and behind them at most one of buffers.
using Fragments = std::deque<FragmentSchedule>;

}  // namespace lowcomm
