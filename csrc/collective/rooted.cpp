// broadcast of W ranks, n bytes of the encoded tensor:
//   1. The root encodes its tensor once, frame by frame, and sends each frame to all others: (W - 1)·n bytes out.
//   2. Every rank decodes the frames, n bytes in, the root those that it sent.
//
// gather:
//   1. Every rank encodes its tensor and sends it to the root: n bytes out. The root encodes its own too.
//   2. The root decodes the frames of all ranks, (W - 1)·n bytes in, and its own.
//
// scatter, exact, of parts of n bytes:
//   1. The root sends every other rank its part, (W - 1)·n bytes out, and copies its own.
//   2. The others receive theirs, n bytes in.
#include "collective/collectives.h"

#include <cstddef>
#include <cstring>
#include <deque>
#include <iterator>
#include <memory>
#include <span>

#include "base/error.h"
#include "collective/exchange.h"
#include "collective/message_summary.h"
#include "collective/op_context.h"
#include "collective/plan.h"
#include "collective/source_sink.h"

namespace lowcomm {
namespace {

template <class Message>
MessagePlan planOf(const OpContext& op, const Message& message) {
  return planMessage(Layout::single(message.elements, message.codec), message.dtype, op.chunkBytes());
}

// One tensor of a broadcast.
class FromRoot final : public Phase {
 public:
  FromRoot(OpContext& op, const BroadcastMessage& message, int root) : root_(root), plan_(planOf(op, message)) {
    const bool sends = op.rank() == root;
    DeviceCodec* device_codec = message.device_codec;
    if (sends) source_ = makeSource(op, device_codec, {plan_, message.data, message.draws, {}, message.data});
    // The source decodes a device's elements as it encodes them.
    if (!(sends && device_codec)) sink_ = makeSink(op, device_codec, {plan_, message.data});
    out.assign(op.size(), sends ? &plan_ : nullptr);
    in = onlyFor(root, op.size(), &plan_);
    same_to_all = sends;
  }

  const MessagePlan& plan() const { return plan_; }
  uint64_t rawBytes() const { return source_ ? plan_.rawBytes() * (out.size() - 1) : 0; }

  void start(size_t k) override {
    if (source_) source_->start(k);
  }
  void encode(size_t k, int /*peer*/, std::span<std::byte> payload) override { source_->encode(k, payload); }
  void absorb(size_t k, const Payloads& payloads) override {
    if (sink_) sink_->take(k, payloads[root_], root_);
  }
  void wait() {
    if (sink_) sink_->wait();
  }

 private:
  const int root_;
  const MessagePlan plan_;
  std::unique_ptr<Source> source_;  // of the root
  std::unique_ptr<Sink> sink_;
};

// One tensor of a gather.
class ToRoot final : public Phase {
 public:
  ToRoot(OpContext& op, const RootGatherMessage& message, int root)
      : takes_(op.rank() == root), plan_(planOf(op, message)) {
    DeviceCodec* device_codec = message.device_codec;
    void* decoded = takes_ ? message.outputs[root] : nullptr;
    source_ = makeSource(op, device_codec, {plan_, message.input, message.draws, {}, decoded});
    for (int rank = 0; takes_ && rank < op.size(); ++rank) {
      // The source decodes a device's elements as it encodes them.
      const bool there = rank == root && device_codec;
      sinks_.push_back(there ? nullptr : makeSink(op, device_codec, {plan_, message.outputs[rank]}));
    }
    out = onlyFor(root, op.size(), &plan_);
    in.assign(op.size(), takes_ ? &plan_ : nullptr);
    same_to_all = takes_;  // to nobody: the root encodes what it keeps, to have it as the others' are
  }

  const MessagePlan& plan() const { return plan_; }
  uint64_t rawBytes() const { return takes_ ? 0 : plan_.rawBytes(); }

  void start(size_t k) override { source_->start(k); }
  void encode(size_t k, int /*peer*/, std::span<std::byte> payload) override { source_->encode(k, payload); }
  void absorb(size_t k, const Payloads& payloads) override {
    for (size_t rank = 0; rank < sinks_.size(); ++rank) {
      if (sinks_[rank] && !payloads[rank].empty()) sinks_[rank]->take(k, payloads[rank], static_cast<int>(rank));
    }
  }
  void wait() {
    for (const auto& sink : sinks_) {
      if (sink) sink->wait();
    }
  }

 private:
  const bool takes_;
  const MessagePlan plan_;
  std::unique_ptr<Source> source_;
  std::vector<std::unique_ptr<Sink>> sinks_;  // on the root, by rank
};

// One tensor of a scatter.
class PartsFromRoot final : public Phase {
 public:
  PartsFromRoot(OpContext& op, const RootScatterMessage& message, int root)
      : message_(message),
        root_(root),
        sends_(op.rank() == root),
        plan_(planMessage(Layout::single(message.elements, CodecSpec{}), message.dtype, op.chunkBytes())) {
    out.assign(op.size(), sends_ ? &plan_ : nullptr);
    out[op.rank()] = nullptr;
    in = sends_ ? std::vector<const MessagePlan*>(op.size()) : onlyFor(root, op.size(), &plan_);
    sources_.resize(op.size());
    for (int rank = 0; sends_ && rank < op.size(); ++rank) {
      if (rank != root) sources_[rank] = makeSource(op, nullptr, {plan_, message.inputs[rank], {}});
    }
    if (!sends_) sink_ = makeSink(op, nullptr, {plan_, message.output});
  }

  const MessagePlan& plan() const { return plan_; }
  uint64_t rawBytes() const { return sends_ ? plan_.rawBytes() * (out.size() - 1) : 0; }

  void encode(size_t k, int peer, std::span<std::byte> payload) override { sources_[peer]->encode(k, payload); }
  void absorb(size_t k, const Payloads& payloads) override {
    if (sink_ && !payloads[root_].empty()) sink_->take(k, payloads[root_], root_);
  }
  void wait() {
    if (sink_) return sink_->wait();
    const void* own = message_.inputs[root_];
    if (own != message_.output && plan_.rawBytes() > 0) std::memcpy(message_.output, own, plan_.rawBytes());
  }

 private:
  const RootScatterMessage& message_;
  const int root_;
  const bool sends_;
  const MessagePlan plan_;
  std::vector<std::unique_ptr<Source>> sources_;  // on the root, by rank; null for itself
  std::unique_ptr<Sink> sink_;                    // on the others
};

// describe(), with the root before the codec.
KeyValues describeRooted(const std::string& op, const std::vector<MessageSummary>& messages, int root) {
  KeyValues description = describe(op, messages);
  description.fields.insert(std::prev(description.fields.end()), {"root", std::to_string(root)});
  return description;
}

// All tensors as one exchange, each of them a phase.
template <class Role, class Message>
void exchangeWithRoot(OpContext& op, const std::vector<Message>& messages, int root) {
  expectRoot(op, root);
  std::deque<Role> tensors;
  std::vector<MessageSummary> summaries;
  Exchange exchange;
  for (const Message& message : messages) {
    Role& tensor = tensors.emplace_back(op, message, root);
    summaries.push_back(MessageSummary(tensor.plan()).as(message.type_name, message.type_elements));
    op.counters.raw_bytes += tensor.rawBytes();
    exchange.phases.push_back(&tensor);
  }
  exchange.description = describeRooted(op.op, summaries, root);
  runExchange(op, exchange);
  for (Role& tensor : tensors)
    tensor.wait();
}

}  // namespace

void expectRoot(const OpContext& op, int root) {
  if (root >= 0 && root < op.size()) return;
  throw ValueError(op.op + ": expected a root among the ranks 0..." + std::to_string(op.size() - 1) + ", got " +
                   std::to_string(root));
}

void broadcast(OpContext& op, const std::vector<BroadcastMessage>& messages, int root) {
  exchangeWithRoot<FromRoot>(op, messages, root);
}

void gather(OpContext& op, const std::vector<RootGatherMessage>& messages, int root) {
  exchangeWithRoot<ToRoot>(op, messages, root);
}

void scatter(OpContext& op, const std::vector<RootScatterMessage>& messages, int root) {
  exchangeWithRoot<PartsFromRoot>(op, messages, root);
}

}  // namespace lowcomm
