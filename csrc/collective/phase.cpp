#include "collective/phase.h"

#include <algorithm>

#include "collective/plan.h"
#include "collective/send_window.h"

namespace lowcomm {
namespace {

constexpr size_t kFewestAhead = 4;

using Direction = std::vector<const MessagePlan*> Phase::*;

size_t aheadOf(const std::vector<Phase*>& phases, Direction direction, int peer) {
  size_t all = 0, longest = 0, largest = 1;
  for (const Phase* phase : phases) {
    const MessagePlan* plan = (phase->*direction)[peer];
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

size_t Phase::rounds() const {
  size_t most = 0;
  for (const auto* messages : {&out, &in}) {
    for (const MessagePlan* message : *messages)
      most = std::max(most, message ? message->frames.size() : 0);
  }
  return most;
}

std::vector<const MessagePlan*> onlyFor(int rank, int ranks, const MessagePlan* plan) {
  std::vector<const MessagePlan*> messages(ranks, nullptr);
  messages[rank] = plan;
  return messages;
}

std::vector<Round> roundsOf(const std::vector<Phase*>& phases) {
  std::vector<Round> rounds;
  size_t before = 0;  // where the rounds of the phase before begin
  for (Phase* phase : phases) {
    const size_t begin = rounds.size();
    for (size_t k = 0; k < phase->rounds(); ++k) {
      const size_t after = phase->readyAfter(k);
      rounds.push_back({phase, k, after > 0 ? before + after : 0});
    }
    before = begin;
  }
  return rounds;
}

size_t roundsAhead(const std::vector<Phase*>& phases, int rank) {
  size_t ahead = kFewestAhead;
  const int peers = phases.empty() ? 0 : static_cast<int>(phases[0]->in.size());
  for (int peer = 0; peer < peers; ++peer) {
    if (peer == rank) continue;
    ahead = std::max({ahead, aheadOf(phases, &Phase::in, peer), aheadOf(phases, &Phase::out, peer)});
  }
  return std::min(ahead, SendWindow::kMost);
}

}  // namespace lowcomm
