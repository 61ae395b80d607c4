#pragma once

#include <cstddef>
#include <vector>

#include "collective/exchange.h"

namespace lowcomm {

// A frame to each peer and one from each: the step of an exchange.
struct Round {
  size_t phase;
  size_t k;      // counted in the phase
  size_t needs;  // rounds of the exchange that must be over before this one's frames are made
};

// All phases' rounds, in their order.
std::vector<Round> roundsOf(const Exchange& exchange);

// How many rounds' frames to or from a peer of `rank` there is room for at once: half of the longest message, or of
// half the exchange where that is many short ones, from 4 to SendWindow::kMost. What all peers' take is then less than
// what is exchanged.
size_t roundsAhead(const Exchange& exchange, int rank);

}  // namespace lowcomm
