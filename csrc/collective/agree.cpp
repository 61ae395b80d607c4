#include "collective/collectives.h"

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>

#include "collective/context.h"
#include "transport/transport.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

struct Conversation {
  int peer;
  BufferPool::Buffer in;
  std::unique_ptr<Transfer> receiving, sending;
};

}  // namespace

void agree(OpContext& op, const KeyValues& mine) {
  GroupContext& group = op.group;
  const int rank = group.rank(), size = group.size();
  const std::string text = mine.text();
  if (text.size() > group.frames.capacity() - kFrameHeaderBytes) {
    throw ValueError(op.op + ": expected at most " + std::to_string(group.frames.capacity() - kFrameHeaderBytes) +
                     " bytes to agree on, got " + std::to_string(text.size()));
  }
  BufferPool::Buffer out = group.frames.take();
  FrameHeader header = op.header(FrameKind::hello);
  header.payload_bytes = static_cast<uint32_t>(text.size());
  std::memcpy(out.get() + kFrameHeaderBytes, text.data(), text.size());
  const std::span<std::byte> frame(out.get(), kFrameHeaderBytes + text.size());
  sealFrame(frame, header);

  std::vector<Conversation> peers;
  op.conversing = true;
  for (int d = 1; d < size; ++d) {
    const int peer = (rank - d + size) % size;
    Conversation& c = peers.emplace_back(Conversation{peer, group.frames.take(), nullptr, nullptr});
    c.receiving = op.begin(peer, [&] {
      return group.transport.irecv(Lane::control, peer, op.first_tag + kAgreementTag, group.frames.span(c.in));
    });
  }
  for (Conversation& c : peers) {
    c.sending = op.begin(
        c.peer, [&] { return group.transport.isend(Lane::control, c.peer, op.first_tag + kAgreementTag, frame); });
    op.counters.wire_bytes += frame.size();
  }

  std::string differs;
  for (Conversation& c : peers) {
    op.wait(*c.receiving, c.peer, "waiting for what it agrees to");
    op.wait(*c.sending, c.peer, "sending what to agree on");
    KeyValues theirs;
    op.attribute(c.peer, [&] {
      auto bytes = group.frames.span(c.in);
      FrameHeader got = openFrame(bytes);
      FrameHeader want = header;
      want.payload_bytes = got.payload_bytes;
      expectFrame(got, want);
      auto payload = framePayload(bytes, got);
      theirs = KeyValues::parse({reinterpret_cast<const char*>(payload.data()), payload.size()});
      op.counters.received_bytes += kFrameHeaderBytes + payload.size();
    });
    try {
      expectSameFields(mine, rank, theirs, c.peer);
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
