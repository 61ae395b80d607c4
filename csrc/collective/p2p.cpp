#include "collective/p2p.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <span>
#include <string>
#include <utility>

#include "base/error.h"
#include "collective/message_summary.h"
#include "transport/transport.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

// What sender and receiver must agree on, as far as the header tells it.
std::string contents(const FrameHeader& header) {
  std::string text = std::to_string(header.key_hash) + " elements of " + dtypeName(header.dtype);
  if (header.key_hash == 0) return text;
  if (header.codec == CodecId::none) return text + ", exact";
  if (const GridFamily* grid = gridFamily(header.codec)) {
    const bool channel = (header.flags & kChannelFlag) != 0;
    text += " in " + std::string(grid->name) + (grid->named() ? std::to_string(header.bits) : "");
    return text + (channel ? ":axis=channel,C=" : ":bucket=") + std::to_string(header.bucket);
  }
  const PlainFamily* plain = plainFamily(header.codec);
  return text + " in " + (plain ? std::string(plain->name) : "codec " + std::to_string(static_cast<int>(header.codec)));
}

// A frame of the right message that is not what this rank expects is told as a whole: its first field alone would not
// say that the ranks' tensors differ.
void expectMessage(const FrameHeader& got, const FrameHeader& want) {
  const bool placed = got.epoch == want.epoch && got.sequence == want.sequence && got.kind == want.kind;
  if (placed && contents(got) != contents(want)) {
    throw WireError("message: expected " + contents(want) + ", got " + contents(got));
  }
  expectFrame(got, want);
}

}  // namespace

MessagePlan planP2p(uint64_t elements, const CodecSpec& codec, DType dtype, size_t chunk_bytes) {
  MessagePlan plan = planMessage(Layout::single(elements, codec), dtype, chunk_bytes);
  if (plan.frames.empty()) plan.frames.emplace_back();
  return plan;
}

P2pMessage::P2pMessage(GroupContext& group, MessagePlan plan, const void* input, const Draws& draws, int peer,
                       uint32_t tag, DeviceCodec* device_codec)
    : op(group, "send with tag " + std::to_string(tag), 0),
      peer(peer),
      tag(tag),
      plan_(std::move(plan)),
      sends_(true),
      source_(makeSource(op, device_codec, {plan_, input, draws})) {
  op.counters.raw_bytes = plan_.rawBytes();
}

P2pMessage::P2pMessage(GroupContext& group, MessagePlan plan, void* output, int peer, uint32_t tag,
                       DeviceCodec* device_codec)
    : op(group, "recv with tag " + std::to_string(tag), 0),
      peer(peer),
      tag(tag),
      plan_(std::move(plan)),
      sends_(false),
      sink_(makeSink(op, device_codec, {plan_, output})) {}

FrameHeader P2pMessage::header(const Frame& frame) const {
  FrameHeader header = plan_.header(frame);
  header.sequence = op.sequence;
  header.epoch = op.group.epoch;
  header.key_hash = plan_.layout.elements();
  return header;
}

// To the flight record: what both sides must mean, and what will come.
void P2pMessage::describe(OpProgress::State& state) const {
  const MessageSummary described(plan_);
  state.sequence = op.sequence;
  state.description = {{"peer", std::to_string(peer)},
                       {"tag", std::to_string(tag)},
                       {"dtype", described.dtype},
                       {"elements", described.elements},
                       {"codec", described.codec}};
  state.frames.resize(op.group.size());
  if (!sends_) state.frames[peer].expected = static_cast<uint32_t>(plan_.frames.size());
  state.start();
}

class P2p::Posting {
 public:
  Posting(P2p& p2p, const Key& key) : p2p_(p2p), key_(key) {
    std::lock_guard<std::mutex> lock(p2p_.mutex_);
    const auto [at, fresh] = p2p_.streams_.try_emplace(key);
    stream_ = &at->second;  // stays where it is
    ++stream_->posting;
    const auto& [peer, tag, sends] = key;
    if (!fresh || sends) return;
    stream_->last = p2p_.received_[peer].last(tag);
    stream_->counted = stream_->last > 0;
  }
  ~Posting() {
    std::lock_guard<std::mutex> lock(p2p_.mutex_);
    --stream_->posting;
    p2p_.close(key_, *stream_);
  }
  Posting(const Posting&) = delete;
  Posting& operator=(const Posting&) = delete;

  Stream& stream() { return *stream_; }

 private:
  P2p& p2p_;
  const Key key_;
  Stream* stream_;
};

void P2p::post(const std::shared_ptr<P2pMessage>& message) {
  Posting posting(*this, keyOf(*message));
  Stream& stream = posting.stream();
  std::lock_guard<std::mutex> in_order(stream.in_order);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    message->op.sequence =
        message->sends_ ? sent_[message->peer].next(message->tag) : (stream.last = numberAfter(stream.last));
    stream.under_way.push_back(message);
  }
  message->op.conversing = true;
  message->op.note([&](OpProgress::State& state) { message->describe(state); });
  try {
    message->sends_ ? send(*message) : receive(*message);
  } catch (const TransportError& error) {
    message->op.fail(message->peer, error, "starting a transfer");
  }
}

void P2p::send(P2pMessage& message) {
  OpContext& op = message.op;
  const auto source = std::move(message.source_);  // a message may outlive its elements, and their device codec
  const size_t frames = message.plan_.frames.size();
  std::string reason;
  size_t started = 0;
  for (size_t k = 0; k < frames; ++k) {
    message.frames_.push_back(group_.frames.take());
    const std::span<std::byte> room = group_.frames.span(message.frames_.back());
    size_t bytes = 0;
    {
      Stopwatch watch(op, Doing::encode);
      const FrameHeader header = message.header(message.plan_.frames[k]);
      try {
        // A device makes the next frame while the host waits for this one.
        for (; !message.own_error_ && started < std::min(frames, k + 2); ++started)
          source->start(started);
        if (!message.own_error_) source->encode(k, room.subspan(kFrameHeaderBytes, header.payload_bytes));
      } catch (const ValueError& mistake) {
        message.own_error_ = std::current_exception();
        reason = op.refusal(mistake);
        op.counters.raw_bytes = 0;  // nothing is delivered
        op.note([&](OpProgress::State& state) { state.end(reason); });
      }
      if (message.own_error_) {
        bytes = sealText(room.data(), op.header(FrameKind::error), reason);
      } else {
        bytes = kFrameHeaderBytes + header.payload_bytes;
        sealFrame(room.first(bytes), header);
      }
    }
    message.transfers_.push_back(
        group_.transport.isend(Lane::bulk, message.peer, kFirstP2pTag + message.tag, room.first(bytes)));
    op.counters.wire_bytes += bytes;
  }
}

// Into buffers that any frame fits in: a peer's tensor may be longer, and gloo ends the process over a message that
// does not fit.
void P2p::receive(P2pMessage& message) {
  for (size_t i = 0; i < message.plan_.frames.size(); ++i) {
    message.frames_.push_back(group_.frames.take());
    message.transfers_.push_back(group_.transport.irecv(Lane::bulk, message.peer, kFirstP2pTag + message.tag,
                                                        group_.frames.span(message.frames_[i])));
  }
}

void P2p::finish(P2pMessage& message) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    message.finishing_ = true;
  }
  if (message.sends_) {
    for (size_t i = 0; i < message.transfers_.size(); ++i)
      message.op.wait(*message.transfers_[i], message.peer, "sending a frame", static_cast<uint32_t>(i));
  } else {
    decode(message);
  }
  const size_t buffers = message.frames_.size();
  message.transfers_.clear();
  message.frames_.clear();
  message.op.conversing = false;
  message.op.note([&](OpProgress::State& state) {
    state.received_bytes = message.op.counters.received_bytes;
    if (!message.refused_) state.end("");  // of a send that failed the first end counts
  });
  forget(message);
  group_.frames.trimAfter(buffers);
  if (message.own_error_) std::rethrow_exception(message.own_error_);
  if (message.refused_) message.op.refused(message.peer, *message.refused_);
}

void P2p::decode(P2pMessage& message) {
  OpContext& op = message.op;
  const auto sink = std::move(message.sink_);
  for (size_t i = 0; i < message.transfers_.size(); ++i) {
    const Frame& frame = message.plan_.frames[i];
    op.wait(*message.transfers_[i], message.peer, "waiting for a frame", static_cast<uint32_t>(i));
    op.note([&](OpProgress::State& state) { state.frames[message.peer].received = static_cast<uint32_t>(i + 1); });
    Stopwatch watch(op, Doing::decode);
    op.attribute(message.peer, [&] {
      const std::span<const std::byte> bytes = group_.frames.span(message.frames_[i]);
      const FrameHeader got = openFrame(bytes);
      op.counters.received_bytes += kFrameHeaderBytes + got.payload_bytes;
      std::span<const std::byte> payload = framePayload(bytes, got);
      if (i == 0 && got.epoch == group_.epoch) adopt(message, got);
      if (got.kind == FrameKind::error && got.sequence == op.sequence && got.epoch == group_.epoch) {
        const std::string why(reinterpret_cast<const char*>(payload.data()), std::min(payload.size(), kMaxErrorText));
        if (!message.refused_) message.refused_ = why;
        return;
      }
      expectMessage(got, message.header(frame));
      sink->take(i, payload, message.peer);
    });
    message.frames_[i].reset();  // the next message's; peak memory falls while this one is decoded
  }
  sink->wait();
}

// A receive learns from its first frame how its sender counts the tag.
void P2p::adopt(P2pMessage& message, const FrameHeader& got) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto stream = streams_.find(keyOf(message));  // gone where a later message was finished first
    ReceivedNumbers& received = received_[message.peer];
    if ((got.sequence & kSharedNumber) == 0) {
      if (stream != streams_.end() && got.sequence == message.op.sequence) stream->second.counted = true;
      return;
    }
    const bool counted = stream == streams_.end() ? received.last(message.tag) > 0 : stream->second.counted;
    if (counted) return;  // and is refused, as any other number that is not expected
    if (!message.taken_down_ && !received.take(got.sequence)) {
      throw WireError("message number: expected one that has not come before, got " + std::to_string(got.sequence) +
                      " again");
    }
    message.op.sequence = got.sequence;
  }
  message.op.note([&](OpProgress::State& state) { state.sequence = got.sequence; });
}

// With the lock: of a receive that is through though nobody has asked for it, the number in its first frame. Where that
// stayed out of the common count, all numbers after it would be kept for ever.
void P2p::takeDown(P2pMessage& message) {
  try {
    const FrameHeader got = openFrame(group_.frames.span(message.frames_[0]));
    if (got.epoch != group_.epoch || (got.sequence & kSharedNumber) == 0) return;
    message.taken_down_ = received_[message.peer].take(got.sequence);
  } catch (const WireError&) {
    // Its holder is told when he finishes it.
  }
}

// A stream is in order: what is older than a message that is through is through as well, also where nobody asked.
void P2p::forget(const P2pMessage& done) {
  std::deque<std::shared_ptr<P2pMessage>> dropped;  // destroyed without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  const auto stream = streams_.find(keyOf(done));
  if (stream == streams_.end()) return;
  auto& under_way = stream->second.under_way;
  const auto at = std::find_if(under_way.begin(), under_way.end(), [&](const auto& m) { return m.get() == &done; });
  if (at == under_way.end()) return;  // a later one was through before
  for (auto through = under_way.begin(); through != std::next(at); ++through) {
    if (!(*through)->finishing_) {
      (*through)->op.note([](OpProgress::State& state) { state.end(""); });
      if (!(*through)->sends_) takeDown(**through);
    }
    dropped.push_back(std::move(*through));
  }
  under_way.erase(under_way.begin(), std::next(at));
  close(stream->first, stream->second);
}

// With the lock: drops a stream that nobody is at. Of a tag that its sender counts by itself the number stays.
void P2p::close(const Key& key, Stream& stream) {
  if (stream.posting > 0 || !stream.under_way.empty()) return;
  const auto [peer, tag, sends] = key;
  if (stream.counted) received_[peer].remember(tag, stream.last);
  streams_.erase({peer, tag, sends});
}

}  // namespace lowcomm
