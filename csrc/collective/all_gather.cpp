#include "collective/all_gather.h"

#include <cstddef>
#include <span>

#include "collective/describe.h"
#include "collective/exchange.h"
#include "collective/parts.h"

namespace lowcomm {
namespace {

void* advance(void* base, uint64_t elements, DType dtype) {
  return static_cast<std::byte*>(base) + elements * itemBytes(dtype);
}

const void* advance(const void* base, uint64_t elements, DType dtype) {
  return static_cast<const std::byte*>(base) + elements * itemBytes(dtype);
}

}  // namespace

void allGather(OpContext& op, const std::vector<GatherMessage>& messages) {
  Exchange exchange;
  exchange.same_to_all = true;
  for (const GatherMessage& message : messages) {
    exchange.messages.push_back(planMessage(message.layout, message.dtype, op.group.chunk_bytes));
    exchange.messages.back().type_name = message.type_name;
    exchange.messages.back().type_elements = message.type_elements;
    op.counters.raw_bytes += exchange.messages.back().rawBytes() * (op.group.size() - 1);
  }
  exchange.description = describe(op.op, exchange.messages);

  OutgoingParts outgoing;  // the same for all peers
  IncomingParts incoming;
  exchange.encode = [&](size_t m, const Chunk& chunk, int, std::span<std::byte> payload) {
    const GatherMessage& message = messages[m];
    size_t at = 0;
    for (const Run& run : chunk.runs) {
      outgoing.write(payload.subspan(at, run.bytes), run, 0, [&](std::span<std::byte> whole) {
        run.encode(whole, advance(message.input, run.at, message.dtype), message.dtype,
                   message.draws.slot(run.segment));
      });
      at += run.bytes;
    }
  };

  exchange.absorb = [&](size_t m, const Chunk& chunk, const std::vector<std::span<const std::byte>>& payloads) {
    const GatherMessage& message = messages[m];
    for (int rank = 0; rank < op.group.size(); ++rank) {
      op.blame(rank, [&] {
        size_t at = 0;
        for (const Run& run : chunk.runs) {
          void* out = advance(message.outputs[rank], run.at, message.dtype);
          const bool in_place = rank == op.group.rank() && run.codec->spec().id == CodecId::none &&
                                out == advance(message.input, run.at, message.dtype);
          const auto whole = incoming.take(run, rank, payloads[rank].subspan(at, run.bytes));
          if (run.last() && !in_place) run.codec->decode(out, message.dtype, whole, run.offset, run.count);
          at += run.bytes;
        }
      });
    }
  };
  runExchange(op, exchange);
}

}  // namespace lowcomm
