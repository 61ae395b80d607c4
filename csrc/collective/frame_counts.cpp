#include "collective/frame_counts.h"

#include <charconv>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "transport/transport.h"
#include "wire/frame.h"
#include "wire/key_values.h"

namespace lowcomm {
namespace {

constexpr uint32_t kTag = 2;  // of the control lane: agreements have 0, notices 1

struct Conversation {
  int peer;
  BufferPool::Buffer out, in;
  std::unique_ptr<Transfer> sending, receiving;
};

uint32_t numberOf(const KeyValues& counts, const std::string& name) {
  for (const auto& [key, value] : counts.fields) {
    uint32_t number = 0;
    const char* end = value.data() + value.size();
    if (key == name && std::from_chars(value.data(), end, number).ptr == end && !value.empty()) return number;
  }
  throw WireError("frame counts: expected a number of '" + name + "', got none");
}

}  // namespace

std::map<int, FrameCounts> exchangeFrameCounts(OpContext& op, const std::map<int, FrameCounts>& mine) {
  GroupContext& group = op.group;
  std::vector<Conversation> peers;
  try {
    for (const auto& [peer, counts] : mine) {
      Conversation& c = peers.emplace_back(Conversation{peer, group.frames.take(), group.frames.take(), {}, {}});
      c.receiving = group.transport.irecv(Lane::control, peer, kTag, group.frames.span(c.in));
    }
    for (Conversation& c : peers) {
      KeyValues counts;
      counts.fields = {{"frames sent", std::to_string(mine.at(c.peer).sent)},
                       {"frames expected", std::to_string(mine.at(c.peer).expected)}};
      const size_t bytes = sealText(c.out.get(), op.header(FrameKind::control), counts.text());
      c.sending = group.transport.isend(Lane::control, c.peer, kTag, group.frames.span(c.out).first(bytes));
      op.counters.wire_bytes += bytes;
    }
  } catch (const TransportError& error) {
    op.fail(error.peer, error, "starting a transfer");
  }
  std::map<int, FrameCounts> theirs;
  for (Conversation& c : peers) {
    op.wait(*c.receiving, c.peer, "waiting for its frame counts");
    op.wait(*c.sending, c.peer, "sending frame counts");
    op.attribute(c.peer, [&] {
      const auto bytes = group.frames.span(c.in);
      const FrameHeader got = openFrame(bytes);
      FrameHeader want = op.header(FrameKind::control);
      want.payload_bytes = got.payload_bytes;
      expectFrame(got, want);
      const auto text = framePayload(bytes, got);
      const KeyValues counts = KeyValues::parse({reinterpret_cast<const char*>(text.data()), text.size()});
      theirs[c.peer] = {numberOf(counts, "frames sent"), numberOf(counts, "frames expected")};
      op.counters.received_bytes += kFrameHeaderBytes + got.payload_bytes;
    });
  }
  return theirs;
}

}  // namespace lowcomm
