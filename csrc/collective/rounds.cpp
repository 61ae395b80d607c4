#include "collective/rounds.h"

#include <algorithm>

#include "collective/send_window.h"

namespace lowcomm {
namespace {

constexpr size_t kFewestAhead = 4;

using Messages = std::vector<const MessagePlan*> Phase::*;

size_t aheadOf(const Exchange& exchange, Messages direction, int peer) {
  size_t all = 0, longest = 0, largest = 1;
  for (const Phase& phase : exchange.phases) {
    const MessagePlan* plan = (phase.*direction)[peer];
    if (!plan) continue;
    size_t message = 0;
    for (const Frame& frame : plan->frames) {
      message += frame.payload_bytes;
      largest = std::max<size_t>(largest, frame.payload_bytes);
    }
    all += message;
    longest = std::max(longest, message);
  }
  return std::max(longest, all / 2) / (2 * largest);
}

}  // namespace

std::vector<Round> roundsOf(const Exchange& exchange) {
  std::vector<Round> rounds;
  std::vector<size_t> starts;
  for (size_t p = 0; p < exchange.phases.size(); ++p) {
    const Phase& phase = exchange.phases[p];
    starts.push_back(rounds.size());
    for (size_t k = 0; k < phase.rounds(); ++k)
      rounds.push_back({p, k, phase.after ? starts[*phase.after] + phase.ready(k) + 1 : 0});
  }
  return rounds;
}

size_t roundsAhead(const Exchange& exchange, int rank) {
  size_t ahead = kFewestAhead;
  const int peers = exchange.phases.empty() ? 0 : static_cast<int>(exchange.phases[0].in.size());
  for (int peer = 0; peer < peers; ++peer) {
    if (peer == rank) continue;
    ahead = std::max({ahead, aheadOf(exchange, &Phase::in, peer), aheadOf(exchange, &Phase::out, peer)});
  }
  return std::min(ahead, SendWindow::kMost);
}

size_t Phase::rounds() const {
  size_t most = 0;
  for (const auto* messages : {&out, &in}) {
    for (const MessagePlan* message : *messages)
      most = std::max(most, message ? message->frames.size() : 0);
  }
  return most;
}

}  // namespace lowcomm
