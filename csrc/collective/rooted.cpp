#include "collective/rooted.h"

#include <cstddef>
#include <deque>
#include <iterator>
#include <span>
#include <string>
#include <utility>

#include "codec/error.h"
#include "collective/describe.h"
#include "collective/exchange.h"
#include "collective/loss.h"
#include "collective/parts.h"
#include "collective/plan.h"

namespace lowcomm {
namespace {

// One tensor that travels as codes, and who is at which end.
class Coded {
 public:
  const MessagePlan plan;

  Coded(OpContext& op, uint64_t elements, const CodecSpec& codec, DType dtype, const Draws& draws)
      : plan(planMessage(Layout::single(elements, codec), dtype, op.group.chunk_bytes)), op_(op), draws_(draws) {}

  void encode(size_t k, std::span<std::byte> payload, const void* input) {
    const auto* elements = static_cast<const std::byte*>(input);
    plan.chunks[k].eachRun(payload, [&](const Run& run, std::span<std::byte> part) {
      outgoing_.write(part, run, 0, [&](std::span<std::byte> whole) {
        const std::byte* src = elements + run.at * itemBytes(plan.dtype);
        run.encode(whole, src, plan.dtype, draws_);
        sample(op_.counters.loss, k, plan.chunks.size(), run, src, plan.dtype, draws_);
      });
    });
  }

  void decode(int rank, size_t k, std::span<const std::byte> payload, void* output) {
    auto* elements = static_cast<std::byte*>(output);
    op_.blame(rank, [&] {
      plan.chunks[k].eachRun(payload, [&](const Run& run, std::span<const std::byte> part) {
        const auto whole = incoming_.take(run, rank, part);
        if (!run.last()) return;
        run.codec->decode(elements + run.at * itemBytes(plan.dtype), plan.dtype, whole, run.offset, run.count);
      });
    });
  }

 private:
  OpContext& op_;
  const Draws draws_;
  OutgoingParts outgoing_;
  IncomingParts incoming_;
};

void expectRoot(const OpContext& op, int root) {
  if (root >= 0 && root < op.group.size()) return;
  throw ValueError(op.op + ": expected a root among the ranks 0..." + std::to_string(op.group.size() - 1) + ", got " +
                   std::to_string(root));
}

// describe(), with the root before the codec.
Hello describeRooted(const std::string& op, const std::vector<Described>& messages, int root) {
  Hello hello = describe(op, messages);
  hello.fields.insert(std::prev(hello.fields.end()), {"root", std::to_string(root)});
  return hello;
}

}  // namespace

void broadcast(OpContext& op, const std::vector<BroadcastMessage>& messages, int root) {
  expectRoot(op, root);
  std::deque<Coded> tensors;
  std::vector<Described> described;
  Exchange exchange;
  const int size = op.group.size();
  const bool sends = op.group.rank() == root;
  for (const BroadcastMessage& message : messages) {
    Coded& tensor = tensors.emplace_back(op, message.elements, message.codec, message.dtype, message.draws);
    described.emplace_back(tensor.plan);
    if (sends) op.counters.raw_bytes += tensor.plan.rawBytes() * (size - 1);
    Phase phase;
    phase.out.assign(size, sends ? &tensor.plan : nullptr);
    phase.in.assign(size, nullptr);
    phase.in[root] = &tensor.plan;
    phase.same_to_all = sends;
    phase.encode = [&](size_t k, int, std::span<std::byte> payload) { tensor.encode(k, payload, message.data); };
    phase.absorb = [&](size_t k, const std::vector<std::span<const std::byte>>& payloads) {
      tensor.decode(root, k, payloads[root], message.data);
    };
    exchange.phases.push_back(std::move(phase));
  }
  exchange.description = describeRooted(op.op, described, root);
  runExchange(op, exchange);
}

void gather(OpContext& op, const std::vector<RootGatherMessage>& messages, int root) {
  expectRoot(op, root);
  std::deque<Coded> tensors;
  std::vector<Described> described;
  Exchange exchange;
  const int size = op.group.size();
  const bool takes = op.group.rank() == root;
  for (const RootGatherMessage& message : messages) {
    Coded& tensor = tensors.emplace_back(op, message.elements, message.codec, message.dtype, message.draws);
    described.emplace_back(tensor.plan);
    if (!takes) op.counters.raw_bytes += tensor.plan.rawBytes();
    Phase phase;
    phase.out.assign(size, nullptr);
    phase.in.assign(size, takes ? &tensor.plan : nullptr);
    phase.out[root] = &tensor.plan;
    phase.same_to_all = takes;  // to nobody: what the root keeps it encodes to have it as the others' are
    phase.encode = [&](size_t k, int, std::span<std::byte> payload) { tensor.encode(k, payload, message.input); };
    phase.absorb = [&](size_t k, const std::vector<std::span<const std::byte>>& payloads) {
      for (int rank = 0; rank < size; ++rank) {
        if (!payloads[rank].empty()) tensor.decode(rank, k, payloads[rank], message.outputs[rank]);
      }
    };
    exchange.phases.push_back(std::move(phase));
  }
  exchange.description = describeRooted(op.op, described, root);
  runExchange(op, exchange);
}

}  // namespace lowcomm
