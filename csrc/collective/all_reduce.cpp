// all_reduce of W ranks, n bytes of the encoded tensor, which is cut into a slice a rank:
//   1. Every rank encodes for each other rank its share of the slice that this one owns, and sends it there:
//      (W - 1)/W·n bytes out.
//   2. It decodes the shares of the others in its own slice, (W - 1)/W·n bytes in, adds them up in rank order, its own
//      elements among them as they are, and encodes the sum.
//   3. It sends the encoded sum to all others, (W - 1)/W·n bytes out, and decodes it too. Frame k leaves as soon as the
//      shares that it was summed from are there, while later ones still arrive.
//   4. It decodes the sums of the others, (W - 1)/W·n bytes in. All ranks have decoded the same codes.
// Slices are equal, or, where the ranks' links are not, of the lengths that keep all of them full (link_shares.h).
// Exact tensors take the same steps, without codes, except between two ranks, and small ones, which a second message
// would make wait longer than their bytes do: every rank sends all of its elements to all others, (W - 1)·n bytes out,
// and adds all up in rank order itself. The bits are the same.
#include "collective/all_reduce.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <span>
#include <string>

#include "base/error.h"
#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "collective/op_context.h"
#include "collective/summer.h"

namespace lowcomm {
namespace {

// Slice s of a tensor is that of rank first_owner + s, and so is weight s.
std::vector<uint64_t> turned(std::vector<uint64_t> weights, uint32_t first_owner) {
  if (!weights.empty()) std::ranges::rotate(weights, weights.begin() + first_owner % weights.size());
  return weights;
}

// The lengths of the ranks' slices. A slow rank sends much in the first phase and receives much in the second, so that
// unequal ones help only where the phases take turns: not where a sum waits for the last frame of a payload.
std::vector<uint64_t> weightsOf(const OpContext& op, const CodecSpec& codec) {
  return canBeCut(codec) ? op.sliceWeights() : std::vector<uint64_t>();
}

// Where phases take turns a link idles in one direction for two frames.
size_t chunkBytes(const OpContext& op, bool takes_turns) {
  return takes_turns ? std::max(kMinChunkBytes, op.chunkBytes() / 4) : op.chunkBytes();
}

// For each rank, the parts of all tensors that make up its slice.
ScatterEntries shareOut(const AllReduceMessage& message, int ranks, const std::vector<uint64_t>& weights) {
  if (message.codec.id == CodecId::none && message.tensors.size() > 1) {  // a layout would join their segments
    throw ValueError("all_reduce: expected one exact tensor in a message, got " +
                     std::to_string(message.tensors.size()));
  }
  const size_t item = itemBytes(message.dtype);
  ScatterEntries entries(ranks);
  for (uint32_t t = 0; t < message.tensors.size(); ++t) {
    const ReduceTensor& tensor = message.tensors[t];
    const std::vector<Slice> slices =
        slicesOf(tensor.elements, message.codec, ranks, turned(weights, tensor.first_owner));
    for (int s = 0; s < ranks; ++s) {
      const auto [first, count] = slices[s];
      if (count == 0) continue;
      ScatterEntry entry{.count = count, .slot = tensor.slot + static_cast<uint64_t>(s), .first = first, .tensor = t};
      if (tensor.data) entry.output = static_cast<std::byte*>(tensor.data) + first * item;
      entry.input = tensor.elsewhere.from ? tensor.elsewhere.from + first : entry.output;
      entry.make = tensor.elsewhere.make;
      if (tensor.residual) entry.residual = tensor.residual + first;
      entry.coded = tensor.elsewhere.coded;
      entries[(tensor.first_owner + s) % ranks].push_back(entry);
    }
  }
  return entries;
}

std::vector<Layout> layoutsOf(const ScatterEntries& entries, const CodecSpec& codec) {
  std::vector<Layout> layouts;
  for (const auto& slice : entries) {
    std::vector<Segment> segments;
    uint64_t first = 0;
    for (const ScatterEntry& entry : slice) {
      segments.push_back({first, entry.count, codec});
      first += entry.count;
    }
    layouts.emplace_back(std::move(segments));
  }
  return layouts;
}

// One message. `send_slices` takes steps 1 and 2, `send_sums` 3 and 4 (collective/summer.h).
struct SlicedTensors {
  SlicedTensors(OpContext& op, const AllReduceMessage& message, const Reduction& reduction, DeviceCodec* device_codec)
      : weights(weightsOf(op, message.codec)),
        entries(shareOut(message, op.size(), weights)),
        plans(std::make_shared<const RankPlans>(layoutsOf(entries, message.codec), message.dtype,
                                                chunkBytes(op, !weights.empty()), op.size())),
        slices(*plans),
        sums(message.sums ? std::make_shared<CodedSums>(plans, entries) : nullptr),
        summer(
            makeSummer(op, device_codec,
                       {slices, entries, message.dtype, message.draws, reduction, /*encoded_again=*/true, sums.get()})),
        send_slices(op, slices, *summer),
        send_sums(op, slices, *summer) {
    send_sums.takes_turns = !weights.empty();
  }

  const std::vector<uint64_t> weights;  // LinkShares::weights
  const ScatterEntries entries;
  const std::shared_ptr<const RankPlans> plans;
  const RankPlans& slices;
  const std::shared_ptr<CodedSums> sums;
  const std::unique_ptr<Summer> summer;
  SendSlices send_slices;
  SendSums send_sums;
};

bool isExactAndWhole(const AllReduceMessage& message, const Reduction& reduction, int ranks) {
  if (message.codec.id != CodecId::none || message.sums) return false;
  if (reduction.premultiplied || message.tensors.size() != 1) return false;
  const ReduceTensor& tensor = message.tensors[0];
  return !tensor.residual && travelsWhole(tensor.elements * itemBytes(message.dtype), ranks);
}

// Describes the message as the caller passed it, not its slices.
MessageSummary summaryOf(const AllReduceMessage& message, const RankPlans& slices) {
  uint64_t elements = 0;
  for (const ReduceTensor& tensor : message.tensors)
    elements += tensor.elements;
  MessageSummary summary = slices.described();
  summary.elements = std::to_string(elements);
  return summary;
}

}  // namespace

void allReduce(OpContext& op, const std::vector<AllReduceMessage>& messages, const Reduction& reduction,
               DeviceCodec* device_codec) {
  std::deque<SlicedTensors> tensors;
  std::vector<const AllReduceMessage*> sliced;  // of each of them
  std::deque<MessagePlan> plans;
  std::vector<std::unique_ptr<Phase>> whole;
  std::vector<MessageSummary> summaries;
  Exchange exchange;
  for (const AllReduceMessage& message : messages) {
    if (message.sums && (device_codec || op.size() == 1))
      throw ValueError(op.op + ": sums that stay in codes: expected host memory and 2 ranks or more, got " +
                       (device_codec ? "a device's" : "1"));
    if (!device_codec && isExactAndWhole(message, reduction, op.size())) {
      const MessagePlan& plan = plans.emplace_back(
          planMessage(Layout::single(message.tensors[0].elements, message.codec), message.dtype, op.chunkBytes()));
      whole.push_back(sendWhole(op, plan, message.tensors[0].data, reduction));
      summaries.emplace_back(plan);
      op.counters.raw_bytes += (op.size() - 1) * plan.rawBytes();
      exchange.phases.push_back(whole.back().get());
      continue;
    }
    SlicedTensors& tensor = tensors.emplace_back(op, message, reduction, device_codec);
    sliced.push_back(&message);
    summaries.push_back(summaryOf(message, tensor.slices));
    op.counters.raw_bytes +=
        tensor.slices.rawBytesToPeers(op.rank()) + (op.size() - 1) * tensor.slices.of(op.rank()).rawBytes();
    exchange.phases.push_back(&tensor.send_slices);
    exchange.phases.push_back(&tensor.send_sums);
  }
  if (op.size() == 1 && !device_codec) {  // nobody to send to
    for (size_t i = 0; i < messages.size(); ++i) {
      for (const ScatterEntry& entry : tensors[i].entries[0])
        reduceAlone(entry, messages[i].codec, messages[i].dtype, reduction);
    }
    return;
  }
  exchange.description = describeReduction(op.op, summaries, reduction);
  exchange.cut_by_links = op.size() > 2 && !tensors.empty();
  runExchange(op, exchange);
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].summer->wait();
    if (sliced[i]->sums) *sliced[i]->sums = tensors[i].sums;
  }
}

}  // namespace lowcomm
