#include "collective/descriptions.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <memory>

#include "base/error.h"
#include "collective/context.h"
#include "collective/exchange.h"
#include "collective/plan.h"
#include "wire/frame.h"

namespace lowcomm {
namespace {

uint32_t numberOf(const KeyValues& counts, const std::string& name) {
  for (const auto& [key, value] : counts.fields) {
    uint32_t number = 0;
    const char* end = value.data() + value.size();
    if (key == name && std::from_chars(value.data(), end, number).ptr == end && !value.empty()) return number;
  }
  throw WireError("frame counts: expected a number of '" + name + "', got none");
}

}  // namespace

// The exchange of counts with one peer.
struct Descriptions::CountExchange {
  int peer;
  BufferPool::Buffer out, in;
  std::unique_ptr<Transfer> sending, receiving;
  FrameCounts theirs = {};
};

Descriptions::Descriptions(OpContext& op, const Exchange& exchange, Conversation& conversation)
    : op_(op), exchange_(exchange), conversation_(conversation), differs_(op.size()) {}

// The text that this rank sends `peer` about the op, and expects from it.
KeyValues Descriptions::forPeer(int peer) const {
  KeyValues description = exchange_.description;
  if (!exchange_.pair_fields.empty()) description.fields.push_back(exchange_.pair_fields[peer]);
  return description;
}

void Descriptions::record() const {
  op_.note([&](OpProgress::State& state) {
    state.description = exchange_.description.fields;
    state.frames.resize(op_.size());
    for (int peer = 0; peer < op_.size(); ++peer) {
      if (peer == op_.rank()) continue;
      state.frames[peer].expected = 1;  // the description
      for (const Phase* phase : exchange_.phases)
        state.frames[peer].expected += phase->in[peer] ? static_cast<uint32_t>(phase->in[peer]->frames.size()) : 0;
    }
  });
}

void Descriptions::send() {
  const int peers = op_.size() - 1;
  frames_.resize(exchange_.pair_fields.empty() ? std::min(peers, 1) : peers);
  size_t bytes = 0;
  for (int d = 1; d <= peers; ++d) {
    const int peer = conversation_.to(d);
    const bool first = static_cast<size_t>(d) <= frames_.size();
    OutgoingFrame& frame = first ? frames_[d - 1] : frames_[0];
    if (first) {
      bytes = sealText(conversation_.memoryOf(frame), op_.header(FrameKind::control), forPeer(peer).text());
    }
    conversation_.send(frame, peer, bytes);
  }
}

std::optional<Descriptions::Difference> Descriptions::compare() {
  std::optional<Difference> first;
  for (int peer = 0; peer < op_.size(); ++peer) {
    if (peer == op_.rank()) continue;
    const auto bytes = conversation_.takeDescription(peer);
    KeyValues theirs;
    op_.attribute(peer, [&] { theirs = read(bytes); });
    try {
      expectSameFields(forPeer(peer), op_.rank(), theirs, peer);
    } catch (const WireError& error) {
      differs_[peer] = true;
      if (!first) first = {peer, error.what()};
    }
  }
  return first;
}

// A control frame of this op as text. Throws WireError.
KeyValues Descriptions::read(std::span<const std::byte> bytes) const {
  const FrameHeader got = openFrame(bytes);
  FrameHeader want = op_.header(FrameKind::control);
  want.payload_bytes = got.payload_bytes;
  expectFrame(got, want);
  const auto text = framePayload(bytes, got);
  KeyValues values = KeyValues::parse({reinterpret_cast<const char*>(text.data()), text.size()});
  op_.counters.received_bytes += kFrameHeaderBytes + got.payload_bytes;
  return values;
}

void Descriptions::part(const std::string& reason) {
  const std::vector<CountExchange> partings = exchangeCounts();
  const size_t bytes = sealText(conversation_.memoryOf(filler_), op_.header(FrameKind::error), reason);
  for (const CountExchange& parting : partings) {
    while (conversation_.sent(parting.peer) < parting.theirs.expected)
      conversation_.send(filler_, parting.peer, bytes);
  }
  for (const CountExchange& parting : partings)
    conversation_.ignore(parting.peer, parting.theirs.sent);
}

// With every peer that differs, each of which does so with this rank among its own.
std::vector<Descriptions::CountExchange> Descriptions::exchangeCounts() const {
  GroupContext& group = op_.group;
  std::vector<CountExchange> partings;
  const uint32_t tag = op_.first_tag + kCountsTag;
  for (int peer = 0; peer < op_.size(); ++peer) {
    if (!differs_[peer]) continue;
    CountExchange& p = partings.emplace_back(CountExchange{peer, group.frames.take(), group.frames.take(), {}, {}});
    p.receiving =
        op_.begin(peer, [&] { return group.transport.irecv(Lane::control, peer, tag, group.frames.span(p.in)); });
  }
  for (CountExchange& p : partings) {
    KeyValues mine;
    mine.fields = {{"frames sent", std::to_string(conversation_.sent(p.peer))},
                   {"frames expected", std::to_string(conversation_.posted(p.peer))}};
    const size_t bytes = sealText(p.out.get(), op_.header(FrameKind::control), mine.text());
    p.sending = op_.begin(p.peer, [&] {
      return group.transport.isend(Lane::control, p.peer, tag, group.frames.span(p.out).first(bytes));
    });
    op_.counters.wire_bytes += bytes;
  }
  for (CountExchange& p : partings) {
    op_.wait(*p.receiving, p.peer, "waiting for its frame counts");
    op_.wait(*p.sending, p.peer, "sending frame counts");
    op_.attribute(p.peer, [&] {
      const KeyValues counts = read(group.frames.span(p.in));
      p.theirs = {numberOf(counts, "frames sent"), numberOf(counts, "frames expected")};
    });
  }
  return partings;
}

void Descriptions::settle() {
  for (OutgoingFrame& frame : frames_)
    conversation_.settle(frame);
  conversation_.settle(filler_);
}

}  // namespace lowcomm
