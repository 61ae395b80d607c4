#include "collective/p2p.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "codec/error.h"
#include "collective/describe.h"
#include "collective/loss.h"
#include "transport/transport.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

// What sender and receiver must agree on, as far as the header tells it.
std::string contents(const FrameHeader& header) {
  std::string text = std::to_string(header.key_hash) + " elements of " + dtypeName(header.dtype);
  if (header.key_hash == 0) return text;
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
  if (plan.chunks.empty()) plan.chunks.emplace_back();
  return plan;
}

P2pMessage::P2pMessage(GroupContext& group, MessagePlan plan, const void* input, const Draws& draws, int peer,
                       uint32_t tag)
    : op(group, "send with tag " + std::to_string(tag), 0),
      peer(peer),
      tag(tag),
      plan_(std::move(plan)),
      sends_(true),
      input_(input),
      draws_(draws) {
  op.counters.raw_bytes = plan_.rawBytes();
}

P2pMessage::P2pMessage(GroupContext& group, MessagePlan plan, void* output, int peer, uint32_t tag)
    : op(group, "recv with tag " + std::to_string(tag), 0),
      peer(peer),
      tag(tag),
      plan_(std::move(plan)),
      sends_(false),
      output_(output) {}

FrameHeader P2pMessage::header(const Chunk& chunk) const {
  FrameHeader header = plan_.header(chunk);
  header.sequence = op.sequence;
  header.epoch = op.group.epoch;
  header.key_hash = plan_.layout.elements();
  return header;
}

// To the flight record: what both sides must mean, and what will come.
void P2pMessage::describe(OpProgress::State& state) const {
  const Described described(plan_);
  state.sequence = op.sequence;
  state.description = {{"peer", std::to_string(peer)},
                       {"tag", std::to_string(tag)},
                       {"dtype", described.dtype},
                       {"elements", described.elements},
                       {"codec", described.codec}};
  state.frames.resize(op.group.size());
  if (!sends_) state.frames[peer].expected = static_cast<uint32_t>(plan_.chunks.size());
  state.start();
}

void P2p::post(const std::shared_ptr<P2pMessage>& message) {
  Stream* stream;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stream = &streams_[{message->peer, message->tag, message->sends_}];  // stays where it is
  }
  std::lock_guard<std::mutex> in_order(stream->posting);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    message->op.sequence = ++stream->last;
    stream->under_way.push_back(message);
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
  OutgoingParts parts;
  std::string reason;
  for (size_t k = 0; k < message.plan_.chunks.size(); ++k) {
    message.frames_.push_back(group_.frames.take());
    const std::span<std::byte> room = group_.frames.span(message.frames_.back());
    size_t bytes = 0;
    {
      Stopwatch watch(op, Doing::encode);
      const FrameHeader header = message.header(message.plan_.chunks[k]);
      try {
        if (!message.own_error_) encode(message, k, room.subspan(kFrameHeaderBytes), parts);
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

void P2p::encode(P2pMessage& message, size_t k, std::span<std::byte> payload, OutgoingParts& parts) {
  const MessagePlan& plan = message.plan_;
  for (const Run& run : plan.chunks[k].runs) {
    const auto* src = static_cast<const std::byte*>(message.input_) + run.at * itemBytes(plan.dtype);
    const Draws draws = message.draws_.slot(run.segment);
    parts.write(payload.first(run.bytes), run, 0, [&](std::span<std::byte> whole) {
      run.encode(whole, src, plan.dtype, draws);
      sample(message.op.counters.loss, k, plan.chunks.size(), run, src, plan.dtype, draws);
    });
    payload = payload.subspan(run.bytes);
  }
}

// Into buffers that any frame fits in: a peer's tensor may be longer, and gloo ends the process over a message that
// does not fit.
void P2p::receive(P2pMessage& message) {
  for (size_t i = 0; i < message.plan_.chunks.size(); ++i) {
    message.frames_.push_back(group_.frames.take());
    message.transfers_.push_back(group_.transport.irecv(Lane::bulk, message.peer, kFirstP2pTag + message.tag,
                                                        group_.frames.span(message.frames_[i])));
  }
}

void P2p::finish(P2pMessage& message) {
  if (message.sends_) {
    for (size_t i = 0; i < message.transfers_.size(); ++i)
      message.op.wait(*message.transfers_[i], message.peer, "sending a frame", static_cast<uint32_t>(i));
  } else {
    decode(message);
  }
  message.transfers_.clear();
  message.frames_.clear();
  message.op.conversing = false;
  message.op.note([&](OpProgress::State& state) {
    state.received_bytes = message.op.counters.received_bytes;
    if (!message.refused_) state.end("");  // of a send that failed the first end counts
  });
  forget(message);
  if (message.own_error_) std::rethrow_exception(message.own_error_);
  if (message.refused_) message.op.refused(message.peer, *message.refused_);
}

void P2p::decode(P2pMessage& message) {
  OpContext& op = message.op;
  IncomingParts parts;
  for (size_t i = 0; i < message.transfers_.size(); ++i) {
    const Chunk& chunk = message.plan_.chunks[i];
    op.wait(*message.transfers_[i], message.peer,
            i > 0 ? "waiting for a frame"
                  : "waiting for the first frame (a message that its sender leaves exact does not come this way)",
            static_cast<uint32_t>(i));
    op.note([&](OpProgress::State& state) { state.frames[message.peer].received = static_cast<uint32_t>(i + 1); });
    Stopwatch watch(op, Doing::decode);
    op.blame(message.peer, [&] {
      const std::span<const std::byte> bytes = group_.frames.span(message.frames_[i]);
      const FrameHeader got = openFrame(bytes);
      op.counters.received_bytes += kFrameHeaderBytes + got.payload_bytes;
      std::span<const std::byte> payload = framePayload(bytes, got);
      if (got.kind == FrameKind::error && got.sequence == op.sequence && got.epoch == group_.epoch) {
        const std::string why(reinterpret_cast<const char*>(payload.data()), std::min(payload.size(), kMaxErrorText));
        if (!message.refused_) message.refused_ = why;
        return;
      }
      expectMessage(got, message.header(chunk));
      const DType dtype = message.plan_.dtype;
      for (const Run& run : chunk.runs) {
        const auto whole = parts.take(run, message.peer, payload.first(run.bytes));
        auto* out = static_cast<std::byte*>(message.output_) + run.at * itemBytes(dtype);
        if (run.last()) run.codec->decode(out, dtype, whole, run.offset, run.count);
        payload = payload.subspan(run.bytes);
      }
    });
    message.frames_[i].reset();  // the next message's; peak memory falls while this one is decoded
  }
}

// A stream is in order: what is older than a message that is through is through as well, also where nobody asked.
void P2p::forget(const P2pMessage& done) {
  std::deque<std::shared_ptr<P2pMessage>> dropped;  // destroyed without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  auto& under_way = streams_[{done.peer, done.tag, done.sends_}].under_way;
  while (!under_way.empty() && static_cast<int32_t>(under_way.front()->op.sequence - done.op.sequence) <= 0) {
    dropped.push_back(std::move(under_way.front()));
    if (!dropped.back()->refused_) dropped.back()->op.note([](OpProgress::State& state) { state.end(""); });
    under_way.pop_front();
  }
}

}  // namespace lowcomm
