#include "collective/rooted.h"

#include <cstddef>
#include <deque>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/error.h"
#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "collective/plan.h"
#include "collective/sink.h"
#include "collective/source.h"

namespace lowcomm {
namespace {

// One tensor, and who is at which end.
struct RootedTensor {
  const MessagePlan plan;
  std::unique_ptr<Source> source;            // null where this rank sends nothing
  std::vector<std::unique_ptr<Sink>> sinks;  // by rank that sends something

  void wait() {
    for (const auto& sink : sinks) {
      if (sink) sink->wait();
    }
  }
};

template <class Message>
MessagePlan planOf(const OpContext& op, const Message& message) {
  return planMessage(Layout::single(message.elements, message.codec), message.dtype, op.group.chunk_bytes);
}

void expectRoot(const OpContext& op, int root) {
  if (root >= 0 && root < op.group.size()) return;
  throw ValueError(op.op + ": expected a root among the ranks 0..." + std::to_string(op.group.size() - 1) + ", got " +
                   std::to_string(root));
}

// describe(), with the root before the codec.
KeyValues describeRooted(const std::string& op, const std::vector<MessageSummary>& messages, int root) {
  KeyValues description = describe(op, messages);
  description.fields.insert(std::prev(description.fields.end()), {"root", std::to_string(root)});
  return description;
}

}  // namespace

void broadcast(OpContext& op, const std::vector<BroadcastMessage>& messages, int root) {
  expectRoot(op, root);
  std::deque<RootedTensor> tensors;
  std::vector<MessageSummary> described;
  Exchange exchange;
  const int size = op.group.size();
  const bool sends = op.group.rank() == root;
  for (const BroadcastMessage& message : messages) {
    RootedTensor& tensor = tensors.emplace_back(RootedTensor{planOf(op, message), nullptr, {}});
    described.push_back(MessageSummary(tensor.plan).as(message.type_name, message.type_elements));
    if (sends) op.counters.raw_bytes += tensor.plan.rawBytes() * (size - 1);
    if (sends) {
      tensor.source =
          makeSource(op, message.device_codec, {tensor.plan, message.data, message.draws, {}, message.data});
    }
    tensor.sinks.resize(size);
    tensor.sinks[root] = makeSink(op, message.device_codec, {tensor.plan, message.data});
    const bool decoded = sends && message.device_codec;  // by the source
    Phase phase;
    phase.out.assign(size, sends ? &tensor.plan : nullptr);
    phase.in.assign(size, nullptr);
    phase.in[root] = &tensor.plan;
    phase.same_to_all = sends;
    if (sends) phase.start = [&](size_t k) { tensor.source->start(k); };
    phase.encode = [&](size_t k, int, std::span<std::byte> payload) { tensor.source->encode(k, payload); };
    phase.absorb = [&, decoded](size_t k, const std::vector<std::span<const std::byte>>& payloads) {
      if (!decoded) tensor.sinks[root]->take(k, payloads[root], root);
    };
    exchange.phases.push_back(std::move(phase));
  }
  exchange.description = describeRooted(op.op, described, root);
  runExchange(op, exchange);
  for (RootedTensor& tensor : tensors)
    tensor.wait();
}

void gather(OpContext& op, const std::vector<RootGatherMessage>& messages, int root) {
  expectRoot(op, root);
  std::deque<RootedTensor> tensors;
  std::vector<MessageSummary> described;
  Exchange exchange;
  const int size = op.group.size();
  const bool takes = op.group.rank() == root;
  for (const RootGatherMessage& message : messages) {
    RootedTensor& tensor = tensors.emplace_back(RootedTensor{planOf(op, message), nullptr, {}});
    described.push_back(MessageSummary(tensor.plan).as(message.type_name, message.type_elements));
    if (!takes) op.counters.raw_bytes += tensor.plan.rawBytes();
    tensor.source =
        makeSource(op, message.device_codec,
                   {tensor.plan, message.input, message.draws, {}, takes ? message.outputs[root] : nullptr});
    for (int rank = 0; takes && rank < size; ++rank)
      tensor.sinks.push_back(makeSink(op, message.device_codec, {tensor.plan, message.outputs[rank]}));
    Phase phase;
    phase.out.assign(size, nullptr);
    phase.in.assign(size, takes ? &tensor.plan : nullptr);
    phase.out[root] = &tensor.plan;
    phase.same_to_all = takes;  // to nobody: what the root keeps it encodes to have it as the others' are
    phase.start = [&](size_t k) { tensor.source->start(k); };
    phase.encode = [&](size_t k, int, std::span<std::byte> payload) { tensor.source->encode(k, payload); };
    phase.absorb = [&, root](size_t k, const std::vector<std::span<const std::byte>>& payloads) {
      for (int rank = 0; rank < size; ++rank) {
        const bool decoded = rank == root && message.device_codec;  // by the source
        if (!payloads[rank].empty() && !decoded) tensor.sinks[rank]->take(k, payloads[rank], rank);
      }
    };
    exchange.phases.push_back(std::move(phase));
  }
  exchange.description = describeRooted(op.op, described, root);
  runExchange(op, exchange);
  for (RootedTensor& tensor : tensors)
    tensor.wait();
}

}  // namespace lowcomm
