// reduce_scatter of W ranks, n bytes of a rank's encoded input, which has a slice for each rank:
//   1. Every rank encodes for each other rank the slice that this one owns, and sends it there: (W - 1)/W·n bytes out.
//   2. It decodes the contributions of the others to its own slice, (W - 1)/W·n bytes in, and adds them up in rank
//      order, its own elements among them as they are.
#include "collective/collectives.h"

#include <cstddef>
#include <deque>
#include <memory>

#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "collective/op_context.h"
#include "collective/plan.h"
#include "collective/summer.h"

namespace lowcomm {
namespace {

// For each rank, where the segments of its slice are: all of them are read, and this rank's are reduced to the output.
ScatterEntries entriesOf(const ScatterMessage& message, const RankPlans& slices, int own) {
  const size_t item = itemBytes(message.dtype);
  ScatterEntries entries(message.inputs.size());
  for (size_t rank = 0; rank < entries.size(); ++rank) {
    const std::vector<Segment>& segments = slices.of(static_cast<int>(rank)).layout.segments();
    uint64_t slot = rank * segments.size();
    for (const Segment& segment : segments) {
      const auto* input = static_cast<const std::byte*>(message.inputs[rank]) + segment.first * item;
      auto* output = static_cast<std::byte*>(message.output) + segment.first * item;
      const bool reduced = rank == static_cast<size_t>(own);
      entries[rank].push_back({segment.count, input, reduced ? output : nullptr, nullptr, slot++});
    }
  }
  return entries;
}

// One tensor.
struct ScatteredTensor {
  ScatteredTensor(OpContext& op, const ScatterMessage& message, const Reduction& reduction, DeviceCodec* device_codec)
      : slices(message.layouts, message.dtype, op.chunkBytes(), op.size()),
        entries(entriesOf(message, slices, op.rank())),
        summer(makeSummer(op, device_codec,
                          {slices, entries, message.dtype, message.draws, reduction, /*encoded_again=*/false})),
        phase(op, slices, *summer) {}

  const RankPlans slices;
  const ScatterEntries entries;
  const std::unique_ptr<Summer> summer;
  SendSlices phase;
};

}  // namespace

void reduceScatter(OpContext& op, const std::vector<ScatterMessage>& messages, const Reduction& reduction,
                   DeviceCodec* device_codec) {
  std::deque<ScatteredTensor> tensors;
  std::vector<MessageSummary> summaries;
  Exchange exchange;
  for (const ScatterMessage& message : messages) {
    ScatteredTensor& tensor = tensors.emplace_back(op, message, reduction, device_codec);
    summaries.push_back(tensor.slices.described());
    op.counters.raw_bytes += tensor.slices.rawBytesToPeers(op.rank());
    exchange.phases.push_back(&tensor.phase);
  }
  exchange.description = describeReduction(op.op, summaries, reduction);
  runExchange(op, exchange);
  for (ScatteredTensor& tensor : tensors)
    tensor.summer->wait();
}

}  // namespace lowcomm
