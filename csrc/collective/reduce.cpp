// reduce of W ranks to a root, n bytes of the tensor, which is cut into a slice a rank:
//   1. Every rank sends each other rank its share of the slice that this one owns: (W - 1)/W·n bytes out.
//   2. It adds up the shares of its own slice in rank order, (W - 1)/W·n bytes in, and divides for an average.
//   3. It sends the sum to the root, n/W bytes out, frame by frame, while later shares still arrive.
// The root's link carries 2(W - 1)/W·n bytes in, where W - 1 whole tensors would be (W - 1)·n.
#include <cstddef>
#include <cstring>
#include <deque>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collective/collectives.h"
#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "collective/op_context.h"
#include "collective/plan.h"
#include "collective/summer.h"

namespace lowcomm {
namespace {

// One tensor. `send_slices` takes steps 1 and 2, `send_sums` 3 (collective/summer.h). Of another rank than the root the
// sums of its own slice go through memory that is dropped.
struct RootedSlices {
  RootedSlices(OpContext& op, const RootReduceMessage& message, const Reduction& reduction, int root)
      : shares(slicesOf(message.elements, CodecSpec{}, op.size())),
        entries(entriesOf(op, message, root)),
        slices(layouts(), message.dtype, op.chunkBytes(), op.size()),
        summer(makeSummer(op, nullptr, {slices, entries, message.dtype, {}, reduction, /*encoded_again=*/true})),
        send_slices(op, slices, *summer),
        send_sums(op, slices, *summer, root) {}

  ScatterEntries entriesOf(const OpContext& op, const RootReduceMessage& message, int root) {
    const size_t item = itemBytes(message.dtype);
    ScatterEntries all(op.size());
    for (int rank = 0; rank < op.size(); ++rank) {
      const Slice& slice = shares[rank];
      if (slice.count == 0) continue;
      void* output = nullptr;
      if (op.rank() == root) {
        output = static_cast<std::byte*>(message.output) + slice.first * item;
      } else if (rank == op.rank()) {
        own.resize(slice.count * item);
        output = own.data();
      }
      all[rank].push_back({slice.count, static_cast<const std::byte*>(message.input) + slice.first * item, output});
    }
    return all;
  }

  std::vector<Layout> layouts() const {
    std::vector<Layout> all;
    for (const Slice& slice : shares)
      all.push_back(Layout::single(slice.count, CodecSpec{}));
    return all;
  }

  const std::vector<Slice> shares;
  std::vector<std::byte> own;
  const ScatterEntries entries;
  const RankPlans slices;
  const std::unique_ptr<Summer> summer;
  SendSlices send_slices;
  SendSums send_sums;
};

}  // namespace

void reduce(OpContext& op, const std::vector<RootReduceMessage>& messages, const Reduction& reduction, int root) {
  expectRoot(op, root);
  std::deque<RootedSlices> tensors;
  std::vector<MessageSummary> summaries;
  Exchange exchange;
  for (const RootReduceMessage& message : messages) {
    RootedSlices& tensor = tensors.emplace_back(op, message, reduction, root);
    MessageSummary summary = tensor.slices.described();
    summary.elements = std::to_string(message.elements);
    summaries.push_back(std::move(summary));
    op.counters.raw_bytes += tensor.slices.rawBytesToPeers(op.rank());
    if (op.rank() != root) op.counters.raw_bytes += tensor.slices.of(op.rank()).rawBytes();
    exchange.phases.push_back(&tensor.send_slices);
    exchange.phases.push_back(&tensor.send_sums);
  }
  if (op.size() == 1) {  // nobody to send to
    for (size_t i = 0; i < messages.size(); ++i) {
      for (const ScatterEntry& entry : tensors[i].entries[0]) {
        if (entry.input != entry.output) std::memcpy(entry.output, entry.input, tensors[i].slices.of(0).rawBytes());
        reduceAlone(entry, CodecSpec{}, messages[i].dtype, reduction);
      }
    }
    return;
  }
  exchange.description = describeReduction(op.op, summaries, reduction);
  exchange.description.fields.insert(std::prev(exchange.description.fields.end()), {"root", std::to_string(root)});
  runExchange(op, exchange);
}

}  // namespace lowcomm
