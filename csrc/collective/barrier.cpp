// barrier of W ranks: every rank sends each other the description of the op, and has come when it has theirs. No other
// bytes.
//
// monitoredBarrier:
//   1. Every other rank sends rank 0 the description.
//   2. Rank 0 waits for all of them, or for the time-out, and names those that are missing.
//   3. It answers each of them with the same.
#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "collective/collectives.h"
#include "collective/context.h"
#include "collective/exchange.h"
#include "collective/text_exchange.h"

namespace lowcomm {
namespace {

KeyValues descriptionOf(const OpContext& op) {
  return {{{"op", op.op}}};
}

// The description of the op each way between this rank and another.
TextExchange greeting(OpContext& op, int peer) {
  return {op, peer, FrameKind::control, Lane::bulk, op.first_tag};
}

// Waits until the peer has come to the same barrier; else throws an error that names it. `doing` and `deadline` as
// OpContext::wait.
void receive(OpContext& op, TextExchange& greeting, const char* doing, std::chrono::milliseconds deadline) {
  const KeyValues theirs = greeting.receive(doing, deadline);
  op.attribute(greeting.peer(), [&] { expectSameFields(descriptionOf(op), op.rank(), theirs, greeting.peer()); });
}

std::string milliseconds(std::chrono::milliseconds time) {
  return std::to_string(time.count()) + " ms";
}

// Rank 0's part. Its error texts are those of torch's monitored_barrier, which programs look for.
void waitForRanks(OpContext& op, std::vector<TextExchange>& ranks, std::chrono::milliseconds timeout,
                  bool wait_all_ranks) {
  const auto end = op.start + timeout;
  std::string missing;
  int first = -1, count = 0;
  for (TextExchange& greeting : ranks) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - OpContext::Clock::now());
    if (left.count() <= 0 && !wait_all_ranks) {
      op.fail(greeting.peer(), "Rank 0 timed out in monitoredBarrier after " + milliseconds(timeout) +
                                   " before it heard of all ranks: expected " + std::to_string(op.size() - 1) +
                                   ", got " + std::to_string(greeting.peer() - 1));
    }
    try {
      receive(op, greeting, "waiting for it to come to a monitored barrier",
              std::max(left, std::chrono::milliseconds(1)));
    } catch (const TransferError& error) {
      if (error.kind == TransportError::Kind::cancelled) throw;
      if (first < 0) first = greeting.peer();
      missing += (missing.empty() ? "" : ", ") + std::to_string(greeting.peer());
      ++count;
      if (!wait_all_ranks) break;
    }
  }
  if (count == 0) return;
  op.fail(first, (wait_all_ranks ? "Ranks " : "Rank ") + missing + " failed to pass monitoredBarrier in " +
                     milliseconds(timeout));
}

}  // namespace

void barrier(OpContext& op) {
  Exchange exchange;
  exchange.description = descriptionOf(op);
  runExchange(op, exchange);
}

void monitoredBarrier(OpContext& op, std::chrono::milliseconds timeout, bool wait_all_ranks) {
  op.conversing = true;
  op.note([&](OpProgress::State& state) { state.description = descriptionOf(op).fields; });
  if (op.rank() == 0) {
    std::vector<TextExchange> ranks;
    for (int peer = 1; peer < op.size(); ++peer)
      ranks.emplace_back(greeting(op, peer)).post();
    waitForRanks(op, ranks, timeout, wait_all_ranks);
    for (TextExchange& rank : ranks)
      rank.send(descriptionOf(op).text());
    for (TextExchange& rank : ranks)
      rank.settle("answering in a monitored barrier");
  } else {
    TextExchange with_first = greeting(op, 0);
    with_first.post();
    with_first.send(descriptionOf(op).text());
    try {
      // Rank 0 judges by the time-out; another rank that gave up first would not hear who is missing.
      const std::chrono::milliseconds deadline(op.group.timeout_ms.load());
      receive(op, with_first, "waiting for rank 0's answer in a monitored barrier", std::max(deadline, 2 * timeout));
      with_first.settle("coming to a monitored barrier");
    } catch (const TransferError& error) {
      throw TransferError("lowcomm: Rank " + std::to_string(op.rank()) +
                              " successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                              "from rank 0, which knows the faulty rank: " +
                              error.what(),
                          error.peer, error.kind);
    }
  }
  op.conversing = false;
}

}  // namespace lowcomm
