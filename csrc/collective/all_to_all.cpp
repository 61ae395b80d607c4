#include "collective/all_to_all.h"

#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "collective/plan.h"
#include "collective/sink.h"
#include "collective/source.h"
#include "collective/staged_check.h"

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

  std::vector<std::unique_ptr<Source>> sources(op.group.size());
  std::vector<std::unique_ptr<Sink>> sinks(op.group.size());
  for (int rank = 0; rank < op.group.size(); ++rank) {
    if (rank == own) continue;
    const Draws draws = message.draws.slot(static_cast<uint64_t>(rank));
    sources[rank] = makeSource(op, message.device_codec,
                               {sent.of(rank), message.inputs[rank], draws, "for rank " + std::to_string(rank)});
    sinks[rank] = makeSink(op, message.device_codec, {got.of(rank), message.outputs[rank]});
  }
  constexpr const char* kKept = "that it keeps";
  std::optional<StagedCheck> check;
  if (message.device_codec) check.emplace(*message.device_codec, sent.of(own), message.inputs[own], kKept);
  Exchange exchange;
  MessageSummary described = MessageSummary(sent.of(own)).as(message.type_name, "by pair");
  described.codec = "by pair";
  exchange.description = describe(op.op, {described});
  exchange.describe_pair = [&](int peer) {
    return std::pair<std::string, std::string>("parts", pairText(own, message.sent[peer], peer, message.got[peer]));
  };
  Phase phase;
  phase.out = sent.all();
  phase.in = got.all();
  if (check) {
    phase.start = [&](size_t k) {
      check->start(k);
      for (int rank = 0; rank < op.group.size(); ++rank) {
        if (rank != own && k < sent.of(rank).frames.size()) sources[rank]->start(k);
      }
    };
  }
  phase.check = [&](size_t k) {
    if (check) return check->finish(k);
    if (k == 0 && codec) codec->expectTaken(message.inputs[own], message.dtype, 0, kept, kKept);
  };
  phase.encode = [&](size_t k, int peer, std::span<std::byte> payload) { sources[peer]->encode(k, payload); };
  phase.absorb = [&](size_t k, const std::vector<std::span<const std::byte>>& payloads) {
    for (int rank = 0; rank < op.group.size(); ++rank) {
      if (!payloads[rank].empty()) sinks[rank]->take(k, payloads[rank], rank);
    }
  };
  exchange.phases.push_back(std::move(phase));
  runExchange(op, exchange);
  for (const auto& sink : sinks) {
    if (sink) sink->wait();
  }

  if (!codec) return;
  if (message.device_codec)
    return message.device_codec->kernels().copy(message.outputs[own], message.inputs[own], kept * item);
  std::memcpy(message.outputs[own], message.inputs[own], kept * item);
  if (codec->needsRepair(message.outputs[own], message.dtype, kept)) {
    codec->repair(message.outputs[own], message.dtype, kept);
  }
}

}  // namespace lowcomm
