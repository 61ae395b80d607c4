#include "collective/text_exchange.h"

#include <vector>

#include "base/error.h"
#include "collective/collectives.h"
#include "collective/context.h"

namespace lowcomm {

KeyValues fieldsIn(OpContext& op, FrameKind kind, std::span<const std::byte> frame) {
  const FrameHeader got = openFrame(frame);
  FrameHeader want = op.header(kind);
  want.payload_bytes = got.payload_bytes;
  expectFrame(got, want);
  const auto text = framePayload(frame, got);
  op.counters.received_bytes += kFrameHeaderBytes + got.payload_bytes;
  return KeyValues::parse({reinterpret_cast<const char*>(text.data()), text.size()});
}

TextExchange::TextExchange(OpContext& op, int peer, FrameKind kind, Lane lane, uint32_t tag)
    : op_(op), peer_(peer), kind_(kind), lane_(lane), tag_(tag) {}

void TextExchange::post() {
  in_ = op_.group.frames.take();
  receiving_ = op_.begin(peer_, [&] { return op_.group.transport.irecv(lane_, peer_, tag_, BufferPool::span(in_)); });
}

void TextExchange::send(const std::string& text) {
  out_ = op_.group.frames.take(kFrameHeaderBytes + text.size());
  const size_t bytes = sealText(out_.get(), op_.header(kind_), text);
  sending_ = op_.begin(
      peer_, [&] { return op_.group.transport.isend(lane_, peer_, tag_, BufferPool::span(out_).first(bytes)); });
  op_.counters.wire_bytes += bytes;
}

KeyValues TextExchange::receive(const char* doing, std::optional<std::chrono::milliseconds> deadline) {
  op_.wait(*receiving_, peer_, doing, std::nullopt, deadline);
  KeyValues theirs;
  op_.attribute(peer_, [&] { theirs = fieldsIn(op_, kind_, BufferPool::span(in_)); });
  return theirs;
}

void TextExchange::settle(const char* doing) {
  op_.wait(*sending_, peer_, doing);
}

void agree(OpContext& op, const KeyValues& mine) {
  GroupContext& group = op.group;
  const int rank = group.rank(), size = group.size();
  const std::string text = mine.text();
  if (text.size() > group.frames.capacity() - kFrameHeaderBytes) {
    throw ValueError(op.op + ": expected at most " + std::to_string(group.frames.capacity() - kFrameHeaderBytes) +
                     " bytes to agree on, got " + std::to_string(text.size()));
  }
  std::vector<TextExchange> peers;
  op.conversing = true;
  group.leaving.settle(op);  // control messages must not overtake them (OpContext::receive)
  for (int d = 1; d < size; ++d)
    peers.emplace_back(op, (rank - d + size) % size, FrameKind::hello, Lane::control, op.first_tag + kAgreementTag)
        .post();
  for (TextExchange& peer : peers)
    peer.send(text);

  std::string differs;
  for (TextExchange& peer : peers) {
    const KeyValues theirs = peer.receive("waiting for what it agrees to");
    peer.settle("sending what to agree on");
    try {
      expectSameFields(mine, rank, theirs, peer.peer());
    } catch (const WireError& error) {
      if (differs.empty()) differs = error.what();
    }
  }
  op.conversing = false;
  if (!differs.empty()) {
    throw PeerRefusal("lowcomm: " + op.op + " refused: " + differs + " [group " + group.name + ", sequence " +
                      std::to_string(op.sequence) + "]");
  }
}

}  // namespace lowcomm
