#include "collective/all_to_all.h"

#include <cstddef>
#include <cstring>
#include <span>
#include <string>

#include "codec/error.h"
#include "collective/describe.h"
#include "collective/exchange.h"
#include "collective/loss.h"
#include "collective/parts.h"
#include "collective/rank_plans.h"

namespace lowcomm {
namespace {

std::string textOf(const Layout& part, int from) {
  const std::string codec = part.segments().empty() ? "none" : part.segments()[0].codec.str();
  return std::to_string(part.elements()) + " by " + codec + " from rank " + std::to_string(from);
}

// "10 by minmax8:bucket=1024 from rank 0, 20 by none from rank 1": alike on both.
std::string pairText(int a, const Layout& from_a, int b, const Layout& from_b) {
  return a < b ? textOf(from_a, a) + ", " + textOf(from_b, b) : textOf(from_b, b) + ", " + textOf(from_a, a);
}

}  // namespace

void allToAll(OpContext& op, const AllToAllMessage& message) {
  const int own = op.group.rank();
  const uint64_t kept = message.sent[own].elements();
  if (kept != message.got[own].elements()) {
    throw ValueError("all_to_all: what rank " + std::to_string(own) + " keeps: expected as many elements in as out, " +
                     std::to_string(kept) + ", got " + std::to_string(message.got[own].elements()));
  }
  const auto plans = [&](const std::vector<Layout>& layouts) {
    return RankPlans(layouts, message.dtype, op.group.chunk_bytes, op.group.size());
  };
  const RankPlans sent = plans(message.sent), got = plans(message.got);
  const auto codec = kept > 0 ? makeCodec(message.sent[own].segments()[0].codec) : nullptr;
  const size_t item = itemBytes(message.dtype);
  for (int rank = 0; rank < op.group.size(); ++rank)
    op.counters.raw_bytes += rank == own ? 0 : sent.of(rank).rawBytes();

  OutgoingParts outgoing;
  IncomingParts incoming;
  Exchange exchange;
  Described described(sent.of(own));
  described.codec = described.elements = "by pair";
  exchange.description = describe(op.op, {described});
  exchange.describe_pair = [&](int peer) {
    return std::pair<std::string, std::string>("parts", pairText(own, message.sent[peer], peer, message.got[peer]));
  };
  Phase phase;
  phase.out = sent.all();
  phase.in = got.all();
  phase.check = [&](size_t k) {
    if (k == 0 && codec) codec->expectTaken(message.inputs[own], message.dtype, 0, kept, "that it keeps");
  };
  phase.encode = [&](size_t k, int peer, std::span<std::byte> payload) {
    const auto* input = static_cast<const std::byte*>(message.inputs[peer]);
    const auto& chunks = sent.of(peer).chunks;
    const Draws draws = message.draws.slot(static_cast<uint32_t>(peer));
    chunks[k].eachRun(payload, [&](const Run& run, std::span<std::byte> part) {
      outgoing.write(part, run, peer, [&](std::span<std::byte> whole) {
        const std::byte* src = input + run.at * item;
        run.encode(whole, src, message.dtype, draws, "for rank " + std::to_string(peer));
        sample(op.counters.loss, k, chunks.size(), run, src, message.dtype, draws);
      });
    });
  };
  phase.absorb = [&](size_t k, const std::vector<std::span<const std::byte>>& payloads) {
    for (int rank = 0; rank < op.group.size(); ++rank) {
      if (payloads[rank].empty()) continue;
      auto* output = static_cast<std::byte*>(message.outputs[rank]);
      op.blame(rank, [&] {
        got.of(rank).chunks[k].eachRun(payloads[rank], [&](const Run& run, std::span<const std::byte> part) {
          const auto whole = incoming.take(run, rank, part);
          if (run.last()) run.codec->decode(output + run.at * item, message.dtype, whole, run.offset, run.count);
        });
      });
    }
  };
  exchange.phases.push_back(std::move(phase));
  runExchange(op, exchange);

  if (!codec) return;
  std::memcpy(message.outputs[own], message.inputs[own], kept * item);
  if (codec->needsRepair(message.outputs[own], message.dtype, kept)) {
    codec->repair(message.outputs[own], message.dtype, kept);
  }
}

}  // namespace lowcomm
