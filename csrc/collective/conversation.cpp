#include "collective/conversation.h"

#include <algorithm>
#include <iterator>

namespace lowcomm {

Conversation::Conversation(OpContext& op, size_t ahead)
    : op_(op), rank_(op.rank()), size_(op.size()), ahead_(ahead), peers_(size_) {}

void Conversation::postDescription(int peer) {
  post(peer, peers_[peer].description);
}

void Conversation::post(int peer, size_t r) {
  post(peer, peers_[peer].rounds[r % ahead_]);
}

void Conversation::post(int peer, IncomingFrame& frame) {
  BufferPool& pool = op_.group.frames;
  if (!frame.buffer) frame.buffer = pool.take();
  const uint32_t tag = tagOf(peers_[peer].posted++);
  frame.receiving =
      op_.begin(peer, [&] { return op_.group.transport.irecv(Lane::bulk, peer, tag, pool.span(frame.buffer)); });
}

std::span<std::byte> Conversation::takeDescription(int peer) {
  const std::span<std::byte> description =
      take(peer, peers_[peer].description, "waiting for its description of the op");
  op_.met(peer);
  return description;
}

std::span<std::byte> Conversation::take(int peer, size_t r) {
  return take(peer, peers_[peer].rounds[r % ahead_], "waiting for a frame");
}

std::span<std::byte> Conversation::take(int peer, IncomingFrame& frame, const char* doing) {
  const uint32_t number = peers_[peer].taken++;
  op_.wait(*frame.receiving, peer, doing, number);
  op_.note([&](OpProgress::State& state) { state.frames[peer].received = number + 1; });
  return op_.group.frames.span(frame.buffer);
}

// Small frames are kept in small buffers: many of them may be on their way when their ops are over.
std::byte* Conversation::memoryOf(OutgoingFrame& frame, size_t bytes) {
  BufferPool& pool = op_.group.frames;
  if (!frame.buffer) frame.buffer = bytes <= pool.capacity() / 4 ? pool.take(bytes) : pool.take();
  return frame.buffer.get();
}

void Conversation::send(OutgoingFrame& frame, int peer, size_t bytes) {
  const std::span<const std::byte> data(frame.buffer.get(), bytes);
  const uint32_t number = peers_[peer].sent++, tag = tagOf(number);
  frame.sending.push_back(
      {peer, number, op_.begin(peer, [&] { return op_.group.transport.isend(Lane::bulk, peer, tag, data); })});
  op_.counters.wire_bytes += bytes;
}

void Conversation::settle(OutgoingFrame& frame) {
  for (OutgoingFrame::Way& way : frame.sending)
    op_.wait(*way.transfer, way.peer, "sending a frame", way.number);
  frame.sending.clear();
}

std::vector<OutgoingFrame>& Conversation::outgoing(size_t r, size_t count) {
  std::vector<OutgoingFrame>& frames = outgoing_[r % ahead_];
  frames.resize(std::max(frames.size(), count));
  return frames;
}

void Conversation::giveBackBefore(size_t r) {
  for (; given_back_ < r; ++given_back_) {
    for (OutgoingFrame& frame : outgoing_[given_back_ % ahead_]) {
      settle(frame);
      frame.buffer.reset();
    }
  }
}

void Conversation::leave(std::vector<OutgoingFrame> frames) {
  for (size_t r = given_back_; r < given_back_ + ahead_; ++r)
    std::move(outgoing_[r % ahead_].begin(), outgoing_[r % ahead_].end(), std::back_inserter(frames));
  for (size_t k = 0; k < frames.size() && !op_.group.leaving.take(frames); ++k)
    settle(frames[k]);
}

void Conversation::ignore(int peer, uint32_t frames) {
  constexpr const char* kIgnored = "waiting for a frame that is not taken";
  for (IncomingFrame& frame : peers_[peer].rounds) {
    if (frame.receiving) op_.wait(*frame.receiving, peer, kIgnored);
  }
  IncomingFrame ignored;
  while (peers_[peer].posted < frames) {
    post(peer, ignored);
    op_.wait(*ignored.receiving, peer, kIgnored);
  }
}

uint32_t Conversation::tagOf(uint32_t number) const {
  return op_.first_tag + number % static_cast<uint32_t>(op_.group.connections);
}

}  // namespace lowcomm
