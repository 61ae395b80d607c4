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
#include "transport/transport.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

KeyValues descriptionOf(const OpContext& op) {
  KeyValues description;
  description.fields = {{"op", op.op}};
  return description;
}

// A frame each way between this rank and another.
struct Greeting {
  explicit Greeting(OpContext& op, int peer) : op(op), peer(peer) {}

  void post() {
    in = op.group.frames.take();
    receiving =
        op.begin(peer, [&] { return op.group.transport.irecv(Lane::bulk, peer, op.first_tag, BufferPool::span(in)); });
  }

  void say() {
    out = op.group.frames.take();
    const size_t bytes = sealText(out.get(), op.header(FrameKind::control), descriptionOf(op).text());
    sending = op.begin(peer, [&] {
      return op.group.transport.isend(Lane::bulk, peer, op.first_tag, BufferPool::span(out).first(bytes));
    });
    op.counters.wire_bytes += bytes;
  }

  // The bytes that came are the description of the same op, or the peer is blamed.
  void check() {
    op.attribute(peer, [&] {
      const auto bytes = BufferPool::span(in);
      const FrameHeader got = openFrame(bytes);
      FrameHeader want = op.header(FrameKind::control);
      want.payload_bytes = got.payload_bytes;
      expectFrame(got, want);
      const auto text = framePayload(bytes, got);
      op.counters.received_bytes += kFrameHeaderBytes + got.payload_bytes;
      expectSameFields(descriptionOf(op), op.rank(),
                       KeyValues::parse({reinterpret_cast<const char*>(text.data()), text.size()}), peer);
    });
  }

  OpContext& op;
  const int peer;
  BufferPool::Buffer in, out;
  std::unique_ptr<Transfer> receiving, sending;
};

std::string milliseconds(std::chrono::milliseconds time) {
  return std::to_string(time.count()) + " ms";
}

// Rank 0's part. Its error texts are those of torch's monitored_barrier, which programs look for.
void waitForRanks(OpContext& op, std::vector<Greeting>& ranks, std::chrono::milliseconds timeout, bool wait_all_ranks) {
  const auto end = op.start + timeout;
  std::string missing;
  int first = -1, count = 0;
  for (Greeting& greeting : ranks) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - OpContext::Clock::now());
    if (left.count() <= 0 && !wait_all_ranks) {
      op.fail(greeting.peer, "Rank 0 timed out in monitoredBarrier after " + milliseconds(timeout) +
                                 " before it heard of all ranks: expected " + std::to_string(op.size() - 1) + ", got " +
                                 std::to_string(greeting.peer - 1));
    }
    try {
      op.wait(*greeting.receiving, greeting.peer, "waiting for it to come to a monitored barrier", std::nullopt,
              std::max(left, std::chrono::milliseconds(1)));
      greeting.check();
    } catch (const TransferError& error) {
      if (error.kind == TransportError::Kind::cancelled) throw;
      if (first < 0) first = greeting.peer;
      missing += (missing.empty() ? "" : ", ") + std::to_string(greeting.peer);
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
    std::vector<Greeting> ranks;
    for (int peer = 1; peer < op.size(); ++peer)
      ranks.emplace_back(op, peer).post();
    waitForRanks(op, ranks, timeout, wait_all_ranks);
    for (Greeting& greeting : ranks)
      greeting.say();
    for (Greeting& greeting : ranks)
      op.wait(*greeting.sending, greeting.peer, "answering in a monitored barrier");
  } else {
    Greeting greeting(op, 0);
    greeting.post();
    greeting.say();
    try {
      // Rank 0 judges by the time-out; another rank that gave up first would not hear who is missing.
      const std::chrono::milliseconds deadline(op.group.timeout_ms.load());
      op.wait(*greeting.receiving, 0, "waiting for rank 0's answer in a monitored barrier", std::nullopt,
              std::max(deadline, 2 * timeout));
      greeting.check();
      op.wait(*greeting.sending, 0, "coming to a monitored barrier");
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
