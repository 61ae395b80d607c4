#include "collective/p2p.h"

#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "codec/error.h"
#include "collective/describe.h"
#include "collective/loss.h"
#include "collective/parts.h"
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

EncodedMessage encodeP2p(GroupContext& group, MessagePlan plan, const void* input, const Draws& draws) {
  EncodedMessage encoded{std::move(plan), {}, OpContext::Clock::now(), {}, {}};
  OutgoingParts parts;
  const size_t frames = encoded.plan.chunks.size();
  for (size_t k = 0; k < frames; ++k) {
    const Chunk& chunk = encoded.plan.chunks[k];
    encoded.frames.push_back(group.frames.take());
    std::span<std::byte> payload = group.frames.span(encoded.frames.back()).subspan(kFrameHeaderBytes);
    for (const Run& run : chunk.runs) {
      const DType dtype = encoded.plan.dtype;
      const auto* src = static_cast<const std::byte*>(input) + run.at * itemBytes(dtype);
      parts.write(payload.first(run.bytes), run, 0, [&](std::span<std::byte> whole) {
        run.encode(whole, src, dtype, draws.slot(run.segment));
        sample(encoded.loss, k, frames, run, src, dtype, draws.slot(run.segment));
      });
      payload = payload.subspan(run.bytes);
    }
  }
  encoded.end = OpContext::Clock::now();
  return encoded;
}

P2pMessage::P2pMessage(GroupContext& group, EncodedMessage encoded, int peer, uint32_t tag)
    : op(group, "send with tag " + std::to_string(tag), 0),
      peer(peer),
      tag(tag),
      plan_(std::move(encoded.plan)),
      sends_(true),
      output_(nullptr),
      frames_(std::move(encoded.frames)) {
  op.counters.encode = encoded.end - encoded.start;
  op.counters.loss = encoded.loss;
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
  // One lock for all: the numbers of a stream are its order on the link.
  std::lock_guard<std::mutex> lock(mutex_);
  Stream& stream = streams_[{message->peer, message->tag, message->sends_}];
  message->op.sequence = ++stream.last;
  stream.under_way.push_back(message);
  message->op.conversing = true;
  message->op.note([&](OpProgress::State& state) { message->describe(state); });
  try {
    message->sends_ ? send(*message) : receive(*message);
  } catch (const TransportError& error) {
    message->op.fail(message->peer, error, "starting a transfer");
  }
}

void P2p::send(P2pMessage& message) {
  for (size_t i = 0; i < message.frames_.size(); ++i) {
    const FrameHeader header = message.header(message.plan_.chunks[i]);
    const std::span<std::byte> frame(message.frames_[i].get(), kFrameHeaderBytes + header.payload_bytes);
    {
      Stopwatch watch(message.op, Doing::encode);
      sealFrame(frame, header);
    }
    message.transfers_.push_back(group_.transport.isend(Lane::bulk, message.peer, kFirstP2pTag + message.tag, frame));
    message.op.counters.wire_bytes += frame.size();
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
  message.op.note([&](OpProgress::State& state) {
    state.received_bytes = message.op.counters.received_bytes;
    state.end("");
  });
  forget(message);
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
      expectMessage(got, message.header(chunk));
      std::span<const std::byte> payload = framePayload(bytes, got);
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
    dropped.back()->op.note([](OpProgress::State& state) { state.end(""); });
    under_way.pop_front();
  }
}

}  // namespace lowcomm
